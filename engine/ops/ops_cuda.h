/*
 * engine/ops/ops_cuda.h - the entries of the table ops_cuda, one a kernel file; called through it.
 */
#ifndef ENGINE_OPS_OPS_CUDA_H
#define ENGINE_OPS_OPS_CUDA_H

#include "engine/ops/ops.h"

C_BEGIN

enum status cuda_embedding_forward(struct stream *s, struct tensor out, struct tensor table,
                                   struct token_rows q, int64_t first, bool set);
enum status cuda_embedding_backward(struct stream *s, struct tensor dtable, struct tensor dout,
                                    struct token_rows q, int64_t first, enum table_rows others);
enum status cuda_embedding_norm_forward(struct stream *s, struct tensor out, struct tensor z,
                                        struct tensor stats, struct tensor x,
                                        struct tensor position, struct tensor type,
                                        struct tensor gamma, struct tensor beta,
                                        const struct sequences *q, float eps, struct dropout drop);
enum status cuda_embedding_norm_backward(struct stream *s, struct tensor dx,
                                         struct tensor dposition, struct tensor dtype_table,
                                         struct tensor dgamma, struct tensor dbeta,
                                         struct tensor dout, struct tensor z, struct tensor stats,
                                         struct tensor gamma, const struct sequences *q,
                                         struct dropout drop, bool add);
enum status cuda_residual_norm_forward(struct stream *s, struct tensor out, struct tensor z,
                                       struct tensor stats, struct tensor x, struct tensor y,
                                       struct tensor gamma, struct tensor beta,
                                       const struct sequences *q, float eps, struct dropout drop);
enum status cuda_residual_norm_backward(struct stream *s, struct tensor dx, struct tensor dy,
                                        struct tensor dgamma, struct tensor dbeta,
                                        struct tensor dbias, struct tensor dout, struct tensor z,
                                        struct tensor stats, struct tensor gamma,
                                        const struct sequences *q, struct dropout drop, bool add);
enum status cuda_linear_forward(struct stream *s, struct tensor y, struct tensor x, struct tensor w,
                                struct tensor bias);
enum status cuda_linear_backward_data(struct stream *s, struct tensor dx, struct tensor dy,
                                      struct tensor w, bool add);
enum status cuda_linear_backward_weight(struct stream *s, struct tensor dw, struct tensor dy,
                                        struct tensor x, bool add);
enum status cuda_gelu_forward(struct stream *s, struct tensor out, struct tensor pre);
enum status cuda_gelu_backward(struct stream *s, struct tensor dpre, struct tensor act,
                               struct tensor dbias, struct tensor dout, struct tensor pre,
                               bool add);
enum status cuda_attention_forward(struct stream *s, struct tensor out, struct tensor lse,
                                   struct tensor qkv, const struct sequences *q, int heads,
                                   struct dropout drop);
enum status cuda_attention_backward(struct stream *s, struct tensor dqkv, struct tensor dbias,
                                    struct tensor dout, struct tensor out, struct tensor lse,
                                    struct tensor qkv, const struct sequences *q, int heads,
                                    struct dropout drop, bool add);
/** cuda_attention_for_hopper() - this program has attention's kernels for Hopper, which keep masks,
 * and this thread's GPU is one. ST_DEVICE. */
MUST_CHECK enum status cuda_attention_for_hopper(bool *out);
enum status cuda_dropout_apply(struct stream *s, struct tensor out, struct tensor x,
                               const struct sequences *q, struct dropout drop);
enum status cuda_span_logits_forward(struct stream *s, struct tensor logits, struct tensor x,
                                     struct tensor w, struct tensor bias,
                                     const struct sequences *q);
enum status cuda_span_logits_backward(struct stream *s, struct tensor dx, struct tensor dw,
                                      struct tensor dbias, struct tensor dlogits, struct tensor x,
                                      struct tensor w, const struct sequences *q, bool add);
enum status cuda_span_loss(struct stream *s, struct tensor dlogits, struct step_report *report,
                           struct tensor logits, const struct sequences *q,
                           const struct step_state *state);
enum status cuda_pass_begin(struct stream *s, double product_flops, uint16_t beside);
enum status cuda_finish_sums(struct stream *s);
enum status cuda_side_begin(struct stream **side, struct stream *s);
enum status cuda_side_end(struct stream *s);
enum status cuda_accumulate(struct stream *s, struct tensor out, struct tensor in, bool add);
enum status cuda_cast(struct stream *s, struct tensor out, struct tensor in);
enum status cuda_master_split(struct stream *s, struct tensor param, struct tensor low,
                              struct tensor master);
enum status cuda_squared_norm(struct stream *s, struct step_report *report, struct tensor g);
enum status cuda_squared_norm_rows(struct stream *s, struct step_report *report, struct tensor g,
                                   const struct sequences *q, int64_t first_row);
enum status cuda_step_begin(struct stream *s, struct step_report *report, struct step_state *state,
                            const struct step_mail *mail);
enum status cuda_agree(struct stream *s, struct step_state *state,
                       const struct step_report *reports, int world_size,
                       const struct optim_hyper *hyper, const struct step_mail *mail);
enum status cuda_adamw(struct stream *s, struct tensor param, struct tensor low, struct tensor m,
                       struct tensor v, struct tensor grad, const struct adam_range *ranges,
                       int range_count, int64_t row_numel, const struct step_state *state,
                       const struct optim_hyper *hyper);

C_END

#endif
