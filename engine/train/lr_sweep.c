#include "engine/train/lr_sweep.h"

#include <math.h>
#include <string.h>

#include "engine/base/arena.h"

static const double WEIGHT = 0.98, LIMIT = 4.0;

enum status lr_sweep_init(struct lr_sweep *s, double from, double to, int64_t steps)
{
    ASSERT(from > 0);
    ASSERT(from < to);
    ASSERT(steps >= LR_SWEEP_MIN_STEPS);
    *s = (struct lr_sweep){.from = from, .to = to, .steps = steps};
    return mem_alloc(&s->points, sizeof *s->points * (size_t)steps);
}

void lr_sweep_release(struct lr_sweep *s)
{
    mem_free(&s->points);
    memset(s, 0, sizeof *s);
}

double lr_sweep_at(const struct lr_sweep *s, int64_t step)
{
    return s->from * pow(s->to / s->from, (double)step / (double)(s->steps - 1));
}

bool lr_sweep_add(struct lr_sweep *s, double lr, double loss)
{
    if (s->diverged || s->count == s->steps)
        return false;
    if (!isfinite(loss)) {
        s->diverged = true;
        return false;
    }
    s->mean = WEIGHT * s->mean + (1 - WEIGHT) * loss;
    double smoothed = s->mean / (1 - pow(WEIGHT, (double)(s->count + 1)));
    s->points[s->count++] = (struct lr_point){lr, loss, smoothed};
    if (s->count == 1 || smoothed < s->best)
        s->best = smoothed;
    s->diverged = smoothed > LIMIT * s->best;
    return !s->diverged && s->count < s->steps;
}

int64_t lr_sweep_suggest(const struct lr_sweep *s)
{
    const int64_t first = LR_SWEEP_SKIP, last = s->count - 2;
    int64_t steepest = -1;
    double least = 0;
    for (int64_t i = first; i <= last && last > first; i++) {
        int64_t before = i > first ? i - 1 : i, behind = i < last ? i + 1 : i;
        double slope =
            (s->points[behind].smoothed - s->points[before].smoothed) / (double)(behind - before);
        if (slope < least) {
            least = slope;
            steepest = i;
        }
    }
    return steepest;
}
