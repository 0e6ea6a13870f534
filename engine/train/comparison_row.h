/*
 * engine/train/comparison_row.h - one run beside the others, and the columns that say it.
 *
 * For engine/train/comparison*.c only: the table for people, compare.csv, compare.json and the page
 * take their numbers from here. A number that is not known is NAN.
 */
#ifndef ENGINE_TRAIN_COMPARISON_ROW_H
#define ENGINE_TRAIN_COMPARISON_ROW_H

#include "engine/train/comparison.h"

C_BEGIN

struct comparison_row {
    const struct run_result *r;
    const struct run_result *base; /* NULL: none that ran */
    int64_t first_difference;      /* from base; 0: identical */
    double ratio, speed_up;
};

struct comparison_column {
    const char *key, *title; /* title NULL: not in the tables for people */
    double (*value)(const struct comparison_row *row, int index);
    int index, digits;
    double unit; /* people see the value divided by it */
};

#define COMPARISON_MIB 1048576.0

enum { COMPARISON_MEMORY = 5, COMPARISON_SPEED = 15 };
extern const struct comparison_column comparison_memory[COMPARISON_MEMORY];
extern const struct comparison_column comparison_speed[COMPARISON_SPEED];

/** comparison_ran() - or did it fail? */
bool comparison_ran(const struct run_result *r);

struct comparison_row comparison_row_of(const struct comparison *c, const struct run_result *r);

/** Bytes of category @index, and milliseconds of part @index of the traced step. */
double comparison_at_peak(const struct comparison_row *row, int index);
double comparison_own_max(const struct comparison_row *row, int index);
double comparison_counted_at_peak(const struct comparison_row *row, int index);
double comparison_counted_own_max(const struct comparison_row *row, int index);
double comparison_part_ms(const struct comparison_row *row, int index);

/** What is no part of the step; @index is not read. */
double comparison_hidden_ms(const struct comparison_row *row, int index);
double comparison_data_ms(const struct comparison_row *row, int index);

/** comparison_json() - compare.json; json_decref(). */
struct json_t *comparison_json(const struct comparison *c);

C_END

#endif
