/*
 * engine/train/report_page.h - engine/train/report.html with data in it.
 *
 * The page is a file of the tree that is built into the program; the Makefile puts the library
 * d3 and its licence in place of "@D3_JS@" and "@D3_LICENCE@". Its script draws the charts from
 * one JSON object, which stands in place of "@DATA@" inside a script element of type
 * application/json; the page's text comes from there alone and is set as text, never as HTML.
 */
#ifndef ENGINE_TRAIN_REPORT_PAGE_H
#define ENGINE_TRAIN_REPORT_PAGE_H

#include "engine/base/status.h"

C_BEGIN

struct json_t;

/** report_page_write() - one file that needs no other. Return: ST_OK; ST_IO; ST_MEMORY. */
MUST_CHECK enum status report_page_write(const char *path, const struct json_t *data);

C_END

#endif
