/*
 * engine/train/products.h - the GEMM plan of a run (engine/ops/gemm_table.h): made once, the same
 * on all ranks, kept.
 *
 * At set-up, when the rehearsal has shown which matrix products the programs run, rank 0 gets an
 * algorithm for each of them at each length class of the run and, those of the forward pass, at the
 * sizes of evaluations; from the first of
 *
 *     the checkpoint that the run goes on from, if it was saved on this kind of card with this
 *     version of the library: then the run computes the bits it would have without the break
 *     the plan file of this card in the user's cache (or in train.gemm_plan)
 *     measuring the candidates, or for evaluations the library's choice; that is added to the file
 *
 * and sends the whole to the other ranks, whose cards must be of the same kind. Nothing is timed
 * once training runs. The plan is written to the output folder as gemm-plan.txt and stored in every
 * checkpoint. A product without an entry runs the heuristic's first choice, which is a function of
 * the product, the card and the version; the end of the run says so. With train.gemm_plan "off" all
 * products do.
 *
 * A plan file is an aid and never a reason to fail: one that is damaged, of another card, or cannot
 * be written is a warning. Ranks on CPUs make no plan; they hand on that of the checkpoint.
 */
#ifndef ENGINE_TRAIN_PRODUCTS_H
#define ENGINE_TRAIN_PRODUCTS_H

#include "comm/comm.h"
#include "engine/ops/gemm_table.h"

C_BEGIN

struct trainer;

/**
 * products_plan() - the plan of this run, on a CUDA device; it becomes t->gemm_plan and the
 * device's. Collective; after the weights are there, before a program runs or is captured.
 *
 * Return: ST_OK; ST_INVALID (ranks have different cards or libraries: names rank and both);
 * ST_COMM; ST_DEVICE; ST_MEMORY.
 */
MUST_CHECK enum status products_plan(struct trainer *t);

/** products_open() - before the rehearsal: what train.gemm_beside says, and which products of a
 * step run beside collectives, by a forecast. ST_MEMORY. */
MUST_CHECK enum status products_open(struct trainer *t);

/** products_close() - the device no longer takes algorithms from t->gemm_plan. Says so if products
 * ran that are not in it. */
void products_close(struct trainer *t);

/* ---- its parts, which need no GPU ------------------------------------------------------------ */

/** products_compare() - all ranks have rank 0's card. Collective. ST_INVALID, if not; ST_COMM. */
MUST_CHECK enum status products_compare(struct comm *comm, const struct gemm_card *card);

/** products_share() - rank 0's table to all ranks. Collective. ST_COMM; ST_MEMORY. */
MUST_CHECK enum status products_share(struct comm *comm, struct gemm_table *table);

/** products_path() - the plan file of @card that train.gemm_plan @where means; "" if there is none
 * (off, or no home folder). ST_INVALID: the path is too long. */
MUST_CHECK enum status products_path(char *out, size_t bytes, const char *where,
                                     const struct gemm_card *card);

/** products_load() - the plan in @path, if it is one of @card; else an empty one of @card, with a
 * warning unless there is no such file. @table: zeroed. ST_MEMORY. */
MUST_CHECK enum status products_load(struct gemm_table *table, const char *path,
                                     const struct gemm_card *card);

/** products_keep() - add what is new in @table from entry @first on to the file @path, which keeps
 * what it has; also makes its folder. Failure is a warning. ST_MEMORY. */
MUST_CHECK enum status products_keep(const char *path, const struct gemm_table *table, int first);

C_END

#endif
