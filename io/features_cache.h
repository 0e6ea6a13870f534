/*
 * io/features_cache.h - windows of tokens kept on disk between runs.
 *
 * The name of a cache file is a hash of what the features depend on: content of the data and of the
 * vocabulary, options, version of the format. A changed file therefore never meets an old cache,
 * and a moved or renamed one finds it again. Several processes may build the same cache at once:
 * files appear whole, and are equal.
 *
 * The cache is an aid and never a reason to fail: a file that is damaged, or a folder that cannot
 * be written, is one warning, and the features are built.
 */
#ifndef IO_FEATURES_CACHE_H
#define IO_FEATURES_CACHE_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/base/status.h"
#include "io/features.h"

C_BEGIN

/**
 * features_load_or_build() - features_build(), or its result of another day.
 * @cache_dir: made if it is not there; "" = no cache.
 * @from_cache: output; whether the features were read. May be NULL.
 *
 * Return: as features_build().
 */
MUST_CHECK enum status features_load_or_build(struct feature_set *set,
                                              const struct squad_data *data,
                                              const struct wordpiece *tok,
                                              const struct feature_options *options,
                                              const char *cache_dir, bool *from_cache);

/**
 * features_find() - the same without the data: only what is kept already.
 * @content_hash: of the data's file (json_file_hash()).
 * @found: output; false leaves @set empty.
 *
 * Return: ST_OK; ST_INVALID if the folder's name is too long.
 */
MUST_CHECK enum status features_find(struct feature_set *set, uint64_t content_hash,
                                     const struct wordpiece *tok,
                                     const struct feature_options *options, const char *cache_dir,
                                     bool *found);

enum { FEATURES_CACHE_NAME_BYTES = 48 };

/** features_cache_name() - file name, without folder: 32 hexadecimal digits and ".features". */
void features_cache_name(char out[FEATURES_CACHE_NAME_BYTES], const struct squad_data *data,
                         const struct wordpiece *tok, const struct feature_options *options);

C_END

#endif
