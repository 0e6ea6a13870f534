/*
 * engine/train/commands.h - the sub-commands of `tessera`.
 *
 * Each gets its own name as argv[0], prints its --help, and returns the status that main() turns
 * into a message and an exit code.
 */
#ifndef ENGINE_TRAIN_COMMANDS_H
#define ENGINE_TRAIN_COMMANDS_H

#include "engine/base/status.h"

C_BEGIN

MUST_CHECK enum status cmd_train(int argc, char **argv);      /* fine-tune and evaluate */
MUST_CHECK enum status cmd_plan(int argc, char **argv);       /* memory of a run, every stage */
MUST_CHECK enum status cmd_compare(int argc, char **argv);    /* stages, ranks, batches */
MUST_CHECK enum status cmd_calibrate(int argc, char **argv);  /* rates of this machine */
MUST_CHECK enum status cmd_report(int argc, char **argv);     /* finished runs as a page */
MUST_CHECK enum status cmd_topo(int argc, char **argv);       /* the machine and its ranks */
MUST_CHECK enum status cmd_lr_find(int argc, char **argv);    /* suggest a learning rate */
MUST_CHECK enum status cmd_predict(int argc, char **argv);    /* answer one question */
MUST_CHECK enum status cmd_eval(int argc, char **argv);       /* EM and F1 of a stored model */
MUST_CHECK enum status cmd_checkpoint(int argc, char **argv); /* look, check, compare, convert */
MUST_CHECK enum status cmd_config(int argc, char **argv);   /* resolved configuration, documents */
MUST_CHECK enum status cmd_score(int argc, char **argv);    /* EM and F1 of a predictions file */
MUST_CHECK enum status cmd_features(int argc, char **argv); /* windows of a SQuAD file as TSV */
MUST_CHECK enum status cmd_tokenize(int argc, char **argv); /* WordPiece tokens as JSON lines */

C_END

#endif
