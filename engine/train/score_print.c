#include "engine/train/score_print.h"

#include "engine/base/out.h"

static void print_part(const char *name, const struct score_part *part)
{
    if (part->total == 0)
        return;
    out("    \"%s_exact\": %.17g,\n    \"%s_f1\": %.17g,\n    \"%s_total\": %lld,\n", name,
        part->exact, name, part->f1, name, (long long)part->total);
}

void score_print(const struct score_result *r, bool unanswerable)
{
    out("    \"exact_match\": %.17g,\n", r->all.exact);
    if (unanswerable)
        out("    \"exact\": %.17g,\n", r->all.exact);
    out("    \"f1\": %.17g,\n    \"total\": %lld,\n", r->all.f1, (long long)r->all.total);
    if (unanswerable) {
        print_part("HasAns", &r->has_answer);
        print_part("NoAns", &r->no_answer);
    }
    if (r->has_best)
        out("    \"best_exact\": %.17g,\n    \"best_exact_thresh\": %.17g,\n"
            "    \"best_f1\": %.17g,\n    \"best_f1_thresh\": %.17g,\n",
            r->best_exact, r->best_exact_thresh, r->best_f1, r->best_f1_thresh);
    out("    \"missing_predictions\": %lld,\n    \"extra_predictions\": %lld\n",
        (long long)r->missing, (long long)r->extra);
}
