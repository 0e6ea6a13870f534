/*
 * comm/topology_format.h - is a text hwloc's XML, and of a format that the library reads?
 *
 *     <topology version="2.0"> ... </topology>      format 1 has no version
 *
 * Libraries of hwloc 2 refuse format 3. What Tessera reads of it is written the same, but for the
 * numbers of device types: format 2 counts them (block 0, GPU 1, network 2, OpenFabrics 3, DMA 4,
 * coprocessor 5), format 3 has a bit for each (storage 1, memory 2, GPU 4, coprocessor 8, network
 * 16, OpenFabrics 32, DMA 64).
 *
 * Source: hwloc's manual, "Importing and exporting topologies from/to XML files"; hwloc.h.
 */
#ifndef COMM_TOPOLOGY_FORMAT_H
#define COMM_TOPOLOGY_FORMAT_H

#include <stdbool.h>

#include "engine/base/status.h"

C_BEGIN

/**
 * topology_format_check() - look at @text, which ends with a zero byte.
 * @knows_3: the library reads format 3; if not, such a text is made one of format 2, in its place.
 *
 * Return: ST_OK; ST_CORRUPT, naming @path: no such XML, cut short, or newer than format 3.
 */
MUST_CHECK enum status topology_format_check(char *text, const char *path, bool knows_3);

C_END

#endif
