/*
 * engine/train/cmd_checkpoint.h - the actions of `tessera checkpoint` that have a file of their
 * own.
 */
#ifndef ENGINE_TRAIN_CMD_CHECKPOINT_H
#define ENGINE_TRAIN_CMD_CHECKPOINT_H

#include "engine/base/options.h"

C_BEGIN

/** checkpoint_diff() - print what differs between the checkpoints paths[0] and paths[1]. ST_CORRUPT
 * if a tensor does; of the training state it is only told. */
MUST_CHECK enum status checkpoint_diff(char **paths);

/* argv[0] is the action's name. */
MUST_CHECK enum status cmd_checkpoint_reshard(int argc, char **argv);
MUST_CHECK enum status cmd_checkpoint_export(int argc, char **argv);
MUST_CHECK enum status cmd_checkpoint_import(int argc, char **argv);

/**
 * checkpoint_arguments() - options_parse(), with paths before, between and behind the options.
 * @paths: room for @path_count; that many there have to be. Return: ST_OK; ST_INVALID.
 */
MUST_CHECK enum status checkpoint_arguments(const struct command *command, int argc, char **argv,
                                            char **paths, int path_count, bool *help_shown);

C_END

#endif
