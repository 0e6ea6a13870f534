/*
 * A chunk as it is stored: the values' bytes sorted into four planes (the lowest byte of every
 * value, then the next, ...), each compressed alone, or as it is where that does not shrink it.
 *
 * Sign and exponent share the highest byte, which takes few values: zstd's entropy coder makes a
 * third of it. The planes of the mantissa are noise, except where values are zero or were bf16.
 */
#include "io/checkpoint_format.h"

#include <string.h>
#include <zstd.h>
#include <zstd_errors.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "engine/base/text.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "values are copied as they lie in files");
_Static_assert(sizeof(struct format_head) == 16 && sizeof(struct format_stream) == 4 &&
                   sizeof(struct format_chunk) == 40 && sizeof(struct format_foot) == 48,
               "no padding in the file");

#ifdef __SSE2__
/* Bytes of 16 values, in four vectors. Of 64 bytes, number i goes to 2i mod 63: the six bits of its
 * number are rotated left by one. */
static inline void interleave(__m128i v[PLANES])
{
    const __m128i a = v[0], b = v[1], c = v[2], d = v[3];
    v[0] = _mm_unpacklo_epi8(a, c);
    v[1] = _mm_unpackhi_epi8(a, c);
    v[2] = _mm_unpacklo_epi8(b, d);
    v[3] = _mm_unpackhi_epi8(b, d);
}

/* Whole groups of 16. Byte p of value e is number 4e + p in the values and 16p + e in the planes:
 * rotations by four and, back again, by two. */
static size_t split_groups(uint8_t *planes, const float *values, size_t numel)
{
    size_t i = 0;
    for (; i + 16 <= numel; i += 16) {
        __m128i v[PLANES];
        memcpy(v, values + i, sizeof v);
        for (int k = 0; k < 4; k++)
            interleave(v);
        for (int p = 0; p < PLANES; p++)
            memcpy(planes + (size_t)p * numel + i, &v[p], sizeof v[p]);
    }
    return i;
}

static size_t join_groups(float *values, const uint8_t *const plane[PLANES], size_t numel)
{
    size_t i = 0;
    for (; i + 16 <= numel; i += 16) {
        __m128i v[PLANES];
        for (int p = 0; p < PLANES; p++)
            memcpy(&v[p], plane[p] + i, sizeof v[p]);
        interleave(v);
        interleave(v);
        memcpy(values + i, v, sizeof v);
    }
    return i;
}
#else
static size_t split_groups(uint8_t *planes, const float *values, size_t numel)
{
    (void)planes, (void)values, (void)numel;
    return 0;
}

static size_t join_groups(float *values, const uint8_t *const plane[PLANES], size_t numel)
{
    (void)values, (void)plane, (void)numel;
    return 0;
}
#endif

static void split(uint8_t *planes, const float *values, size_t numel)
{
    for (size_t i = split_groups(planes, values, numel); i < numel; i++) {
        uint32_t word;
        memcpy(&word, values + i, sizeof word);
        for (int p = 0; p < PLANES; p++)
            planes[(size_t)p * numel + i] = (uint8_t)(word >> (8 * p));
    }
}

static void join(float *values, const uint8_t *const plane[PLANES], size_t numel)
{
    for (size_t i = join_groups(values, plane, numel); i < numel; i++) {
        uint32_t word = (uint32_t)plane[0][i] | (uint32_t)plane[1][i] << 8 |
                        (uint32_t)plane[2][i] << 16 | (uint32_t)plane[3][i] << 24;
        memcpy(values + i, &word, sizeof word);
    }
}

/* At level 1 zstd looks for repetitions of at least 7 bytes in a small table. A plane of exponents
 * is a random sequence of few values, where short matches cost time and gain nothing over entropy
 * coding; runs of zeros are found as before. Twice as fast as plain level 1, and smaller. */
enum status chunk_compressor(struct ZSTD_CCtx_s **out, int level)
{
    const struct {
        ZSTD_cParameter name;
        int value, max_level;
    } parameters[] = {
        {ZSTD_c_compressionLevel, level, 19}, {ZSTD_c_hashLog, 8, 1}, {ZSTD_c_minMatch, 7, 1}};
    *out = ZSTD_createCCtx();
    if (*out == NULL)
        return FAIL(MEMORY, "no memory for zstd");
    for (size_t i = 0; i < sizeof parameters / sizeof *parameters; i++) {
        if (level > parameters[i].max_level)
            continue;
        size_t code = ZSTD_CCtx_setParameter(*out, parameters[i].name, parameters[i].value);
        if (ZSTD_isError(code))
            return FAIL(INVALID, "zstd refuses level %d: %s", level, ZSTD_getErrorName(code));
    }
    return ST_OK;
}

/* Compressed bytes of a plane; n if it does not shrink. @room: at least n bytes. */
static enum status compress_plane(size_t *got, uint8_t *room, const uint8_t *plane, size_t n,
                                  struct ZSTD_CCtx_s *zstd)
{
    *got = ZSTD_compress2(zstd, room, n - 1, plane, n);
    if (!ZSTD_isError(*got))
        return ST_OK;
    if (ZSTD_getErrorCode(*got) != ZSTD_error_dstSize_tooSmall)
        return FAIL(MEMORY, "zstd cannot compress %zu bytes: %s", n, ZSTD_getErrorName(*got));
    *got = n;
    return ST_OK;
}

/* Does any of a few samples of a large plane shrink? Most planes are noise, and this tells in an
 * eighth of the time. Untouched rows are long runs of zeros: samples all over the plane meet some.
 */
static enum status may_shrink(bool *yes, uint8_t *room, const uint8_t *plane, size_t n,
                              struct ZSTD_CCtx_s *zstd)
{
    enum { SAMPLES = 8, SAMPLE_BYTES = 16384 };
    size_t got = 0;
    *yes = n < 2 * SAMPLES * SAMPLE_BYTES;
    for (size_t i = 0; i < SAMPLES && !*yes; i++) {
        TRY(compress_plane(&got, room, plane + i * (n / SAMPLES), SAMPLE_BYTES, zstd));
        *yes = got < SAMPLE_BYTES;
    }
    return ST_OK;
}

enum status chunk_pack(uint8_t *packed, size_t *bytes, uint32_t plane_bytes[PLANES],
                       uint8_t *planes, const float *values, int32_t numel,
                       struct ZSTD_CCtx_s *zstd, bool compress)
{
    size_t n = (size_t)numel, used = 0;
    split(planes, values, n);
    for (int p = 0; p < PLANES; p++) {
        const uint8_t *plane = planes + (size_t)p * n;
        size_t got = n;
        bool shrinks = false;
        if (compress)
            TRY(may_shrink(&shrinks, packed + used, plane, n, zstd));
        if (shrinks)
            TRY(compress_plane(&got, packed + used, plane, n, zstd));
        if (got == n)
            memcpy(packed + used, plane, n);
        plane_bytes[p] = (uint32_t)got;
        used += got;
    }
    *bytes = used;
    return ST_OK;
}

bool chunk_unpack(float *values, uint8_t *planes, const uint8_t *packed,
                  const uint32_t plane_bytes[PLANES], int32_t numel, struct ZSTD_DCtx_s *zstd)
{
    size_t n = (size_t)numel;
    const uint8_t *plane[PLANES];
    for (int p = 0; p < PLANES; p++) {
        plane[p] = packed; /* one that is stored as it is needs no copy */
        if (plane_bytes[p] != n) {
            uint8_t *room = planes + (size_t)p * n;
            if (ZSTD_decompressDCtx(zstd, room, n, packed, plane_bytes[p]) != n)
                return false;
            plane[p] = room;
        }
        packed += plane_bytes[p];
    }
    join(values, plane, n);
    return true;
}

bool checkpoint_state_allowed(const char *state)
{
    size_t bytes = strlen(state);
    return bytes > 0 && bytes < CHECKPOINT_STATE_BYTES &&
           strspn(state, "abcdefghijklmnopqrstuvwxyz0123456789_") == bytes;
}

bool checkpoint_tensor_allowed(const char *name)
{
    size_t bytes = strlen(name);
    for (size_t i = 0; i < bytes; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7F)
            return false;
    return bytes > 0 && bytes < CHECKPOINT_NAME_BYTES && text_is_utf8(name);
}

int checkpoint_file_number(const char *name)
{
    int number = 0;
    if (strlen(name) != strlen("data-00000.tsr") || memcmp(name, "data-", 5) != 0 ||
        strcmp(name + 10, ".tsr") != 0)
        return -1;
    for (int i = 5; i < 10; i++) {
        if (name[i] < '0' || name[i] > '9')
            return -1;
        number = 10 * number + (name[i] - '0');
    }
    return number;
}
