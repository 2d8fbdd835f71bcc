/* Every function of the C interface: what it does, and what it does with bad input. Its argument is an empty
 * folder. */
#include "check.h"

#include <math.h>
#include <pthread.h>

static char folder[4000];

static const char *in_folder(const char *name) {
    static char path[5000];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *path, const char *content) {
    FILE *file = fopen(path, "wb");
    CHECK(file);
    CHECK(fwrite(content, 1, strlen(content), file) == strlen(content));
    CHECK(fclose(file) == 0);
}

static rfd_moments moments(void) {
    return (rfd_moments){sizeof(rfd_moments), 2.5, 0.01, 0.9, 5.0, 300.0, 20000};
}

static rfd_model *new_model(void) {
    rfd_moments m = moments();
    rfd_model *model = NULL;
    OK(rfd_model_create("squared_exponential", &m, &model));
    return model;
}

/* The settings of the method of a fitted model, at their defaults. */
#define FITTED(fit) &(rfd_fitted){.size = sizeof(rfd_fitted), .model = (fit)}

static void versions(void) {
    CHECK(rfd_abi_version() == RFD_ABI_VERSION);
    CHECK(strlen(rfd_version()) >= 5);
    CHECK(!strcmp(rfd_status_string(RFD_OK), "RFD_OK"));
    CHECK(!strcmp(rfd_status_string(RFD_ERROR_BUSY), "RFD_ERROR_BUSY"));
    CHECK(!strcmp(rfd_status_string(12345), "unknown status"));
    CHECK(!strcmp(rfd_last_error(), "")); /* nothing has failed yet */
}

static void models(void) {
    rfd_moments m = moments();
    rfd_model *model = (rfd_model *)&m; /* must stay as it is on errors */
    FAILS(RFD_ERROR_NULL, "covariance", rfd_model_create(NULL, &m, &model));
    FAILS(RFD_ERROR_NULL, "rfd_moments", rfd_model_create("se", NULL, &model));
    FAILS(RFD_ERROR_NULL, "model", rfd_model_create("se", &m, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "matern:1.5", rfd_model_create("spherical", &m, &model));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "UTF-8", rfd_model_create("\xff\xfe", &m, &model));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "aligned", rfd_model_create("se", (rfd_moments *)((char *)&m + 1), &model));
    m.variance = -1.0;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "variance", rfd_model_create("se", &m, &model));
    m = moments();
    const size_t sizes[] = {0, 8, sizeof m - 8, sizeof m - 1, sizeof m + 8, SIZE_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        m.size = sizes[i];
        FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_moments.size", rfd_model_create("se", &m, &model));
    }
    CHECK(model == (rfd_model *)&m);

    m = moments();
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "must be a number", rfd_model_create("rq:", &m, &model));
    OK(rfd_model_create("rq", &m, &model));
    CHECK(!strcmp(rfd_model_covariance(model), "rational_quadratic:1.0"));
    rfd_model_destroy(model);
    OK(rfd_model_create("rq:2", &m, &model));
    CHECK(!strcmp(rfd_model_covariance(model), "rational_quadratic:2.0"));
    CHECK(!strcmp(rfd_model_covariance(NULL), ""));
    rfd_moments back = {.size = sizeof back};
    OK(rfd_model_moments(model, &back));
    CHECK(!memcmp(&m, &back, sizeof m));
    FAILS(RFD_ERROR_NULL, "model", rfd_model_moments(NULL, &back));
    FAILS(RFD_ERROR_NULL, "rfd_moments", rfd_model_moments(model, NULL));
    back.size = 8;
    FAILS(RFD_ERROR_STRUCT_SIZE, "sizeof", rfd_model_moments(model, &back));

    double scale = 0, plateau = 0, rate = 0, step = 0, theta = 0, value = 0, slope = 0;
    OK(rfd_model_scales(model, &scale, &plateau));
    OK(rfd_model_scales(model, NULL, NULL));
    CHECK(scale > 0 && plateau > 0);
    FAILS(RFD_ERROR_NULL, "model", rfd_model_scales(NULL, &scale, &plateau));
    OK(rfd_model_asymptotic_learning_rate(model, 0.0, 1.0 / 128, &rate));
    CHECK(rate > 0);
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "limiting_loss", rfd_model_asymptotic_learning_rate(model, 3.0, 0, &rate));
    FAILS(RFD_ERROR_NULL, "learning_rate", rfd_model_asymptotic_learning_rate(model, 0, 0, NULL));
    FAILS(RFD_ERROR_NULL, "model", rfd_model_asymptotic_learning_rate(NULL, 0, 0, &rate));

    OK(rfd_model_step(model, 2.5, 1.0, 0.0, RFD_MODE_RFD, 0.0, &step, &theta));
    CHECK(step == plateau && isinf(theta));
    OK(rfd_model_step(model, 2.0, 1.0, 0.0, RFD_MODE_RFD, 0.0, &step, NULL));
    CHECK(step > 0 && step < plateau);
    FAILS(RFD_ERROR_NO_STEP, "zero", rfd_model_step(model, 2.0, 0.0, 0, RFD_MODE_RFD, 0, &step, &theta));
    FAILS(RFD_ERROR_NO_STEP, "finite", rfd_model_step(model, NAN, 1.0, 0, RFD_MODE_RFD, 0, &step, &theta));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "mode", rfd_model_step(model, 2.0, 1.0, 0, 3, 0, &step, &theta));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "conservatism", rfd_model_step(model, 2.0, 1.0, 0, 0, 1.0, &step, &theta));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "inv_batch_size", rfd_model_step(model, 2.0, 1.0, 2, 0, 0, &step, &theta));
    FAILS(RFD_ERROR_NULL, "model", rfd_model_step(NULL, 2.0, 1.0, 0, 0, 0, &step, &theta));

    OK(rfd_model_conditional_mean(model, 2.0, 1.0, 0.0, 0.0, &value, &slope));
    CHECK(value == 2.0 && slope < 0);
    OK(rfd_model_conditional_variance(model, 0.0, step, &value, &slope));
    CHECK(value > 0 && value < 0.01);
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "step_size", rfd_model_conditional_mean(model, 2, 1, 0, -1, &value, &slope));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "step_size", rfd_model_conditional_variance(model, 0, NAN, &value, &slope));
    FAILS(RFD_ERROR_NULL, "model", rfd_model_conditional_mean(NULL, 2, 1, 0, 1, &value, &slope));
    FAILS(RFD_ERROR_NULL, "model", rfd_model_conditional_variance(NULL, 0, 1, &value, &slope));

    /* To memory and back, to a file and back. */
    rfd_buffer *json = NULL;
    OK(rfd_model_to_json(model, &json));
    size_t size = rfd_buffer_size(json);
    const char *text = (const char *)rfd_buffer_data(json);
    CHECK(size == strlen(text) && strstr(text, "rfdescent-model"));
    rfd_model *again = NULL;
    OK(rfd_model_from_json(text, size, &again));
    back.size = sizeof back;
    OK(rfd_model_moments(again, &back));
    CHECK(!memcmp(&m, &back, sizeof m));
    rfd_model_destroy(again);
    again = NULL;
    FAILS(RFD_ERROR_FILE, "fitted model", rfd_model_from_json(text, size - 3, &again));
    FAILS(RFD_ERROR_FILE, "fitted model", rfd_model_from_json(NULL, 0, &again));
    FAILS(RFD_ERROR_NULL, "json", rfd_model_from_json(NULL, 1, &again));
    FAILS(RFD_ERROR_NULL, "model", rfd_model_from_json(text, size, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "UTF-8", rfd_model_from_json("\xff", 1, &again));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "memory", rfd_model_from_json(text, SIZE_MAX, &again));
    FAILS(RFD_ERROR_NULL, "model", rfd_model_to_json(NULL, &json));
    FAILS(RFD_ERROR_NULL, "json", rfd_model_to_json(model, NULL));
    rfd_buffer_destroy(json);
    rfd_buffer_destroy(NULL);
    CHECK(rfd_buffer_size(NULL) == 0 && !rfd_buffer_data(NULL));

    OK(rfd_model_save(model, in_folder("model.json")));
    OK(rfd_model_load(in_folder("model.json"), &again));
    CHECK(!strcmp(rfd_model_covariance(again), "rational_quadratic:2.0"));
    rfd_model_destroy(again);
    again = NULL;
    FAILS(RFD_ERROR_IO, "nowhere", rfd_model_load(in_folder("nowhere"), &again));
    FAILS(RFD_ERROR_IO, "nowhere", rfd_model_save(model, in_folder("nowhere/model.json")));
    write_file(in_folder("bad.json"), "{\"format\": 3}");
    FAILS(RFD_ERROR_FILE, "bad.json", rfd_model_load(in_folder("bad.json"), &again));
    FAILS(RFD_ERROR_NULL, "file", rfd_model_load(NULL, &again));
    FAILS(RFD_ERROR_NULL, "model", rfd_model_load(in_folder("model.json"), NULL));
    FAILS(RFD_ERROR_NULL, "model", rfd_model_save(NULL, in_folder("model.json")));
    FAILS(RFD_ERROR_NULL, "file", rfd_model_save(model, NULL));
    CHECK(!again);
    rfd_model_destroy(model);
    rfd_model_destroy(NULL);
    rfd_model_destroy(NULL);
}

/* Samples of three batch sizes whose spread is that of variance 1 and noise variance 100. */
#define SAMPLES 300
static double losses[SAMPLES], squares[SAMPLES];
static uint64_t batch_sizes[SAMPLES];

static void make_samples(void) {
    for (int i = 0; i < SAMPLES; i++) {
        batch_sizes[i] = (uint64_t[]){20, 100, 1000}[i % 3];
        double u = ((i / 3) * 37 % 100 + 0.5) / 50 - 1; /* uniform in (-1, 1): variance 1/3 */
        losses[i] = 10 + u * sqrt(3 * (1 + 100.0 / (double)batch_sizes[i]));
        squares[i] = 5 + 300.0 / (double)batch_sizes[i];
    }
}

static void estimation(void) {
    rfd_statistics *statistics = NULL, *other = NULL;
    FAILS(RFD_ERROR_NULL, "statistics", rfd_statistics_create(NULL));
    OK(rfd_statistics_create(&statistics));
    rfd_fit fit = {.size = sizeof fit}, fit2 = {.size = sizeof fit2};
    fit.mean = 77;
    FAILS(RFD_ERROR_ESTIMATION, "batch size", rfd_statistics_fit(statistics, &fit));
    CHECK(fit.mean == 77);
    for (int i = 0; i < 100; i++) {
        OK(rfd_statistics_push(statistics, losses[i], squares[i], batch_sizes[i]));
    }
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "loss", rfd_statistics_push(statistics, NAN, 1, 20));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "sq_grad_norm", rfd_statistics_push(statistics, 1, -1, 20));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "batchsize", rfd_statistics_push(statistics, 1, 1, 0));
    FAILS(RFD_ERROR_NULL, "statistics", rfd_statistics_push(NULL, 1, 1, 20));

    OK(rfd_statistics_create(&other));
    OK(rfd_statistics_push_array(other, losses + 100, squares + 100, batch_sizes + 100, SAMPLES - 100));
    OK(rfd_statistics_push_array(other, NULL, NULL, NULL, 0));
    double bad[] = {1, INFINITY};
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "sample 1", rfd_statistics_push_array(other, bad, squares, batch_sizes, 2));
    FAILS(RFD_ERROR_NULL, "batch_sizes", rfd_statistics_push_array(other, losses, squares, NULL, 2));
    FAILS(RFD_ERROR_NULL, "losses", rfd_statistics_push_array(other, NULL, squares, batch_sizes, 2));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "memory",
          rfd_statistics_push_array(other, losses, squares, batch_sizes, SIZE_MAX / 8));
    uint64_t batches = 0, examples = 0;
    OK(rfd_statistics_counts(other, &batches, &examples));
    CHECK(batches == SAMPLES - 100);
    OK(rfd_statistics_counts(other, NULL, NULL));
    FAILS(RFD_ERROR_NULL, "statistics", rfd_statistics_counts(NULL, &batches, &examples));

    OK(rfd_statistics_merge(statistics, other));
    FAILS(RFD_ERROR_NULL, "other", rfd_statistics_merge(statistics, NULL));
    FAILS(RFD_ERROR_NULL, "statistics", rfd_statistics_merge(NULL, other));
    OK(rfd_statistics_merge(other, other));
    OK(rfd_statistics_counts(other, &batches, NULL));
    CHECK(batches == 2 * (SAMPLES - 100));
    OK(rfd_statistics_fit(statistics, &fit));
    FAILS(RFD_ERROR_NULL, "statistics", rfd_statistics_fit(NULL, &fit));
    FAILS(RFD_ERROR_NULL, "rfd_fit", rfd_statistics_fit(statistics, NULL));
    fit2.size = 1;
    FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_fit", rfd_statistics_fit(statistics, &fit2));
    fit2.size = sizeof fit2;

    /* The same from arrays and from a file, up to the rounding of another order. */
    OK(rfd_fit_array(losses, squares, batch_sizes, SAMPLES, 0, &fit2, NULL));
    CHECK(fit2.batches == SAMPLES && fit.batches == SAMPLES && fit2.examples == fit.examples);
    CHECK(fabs(fit.mean - fit2.mean) < 1e-12 && fabs(fit.variance / fit2.variance - 1) < 1e-9);
    CHECK(fabs(fit.mean - 10) < 0.5 && fabs(fit.variance - 1) < 0.5);
    FAILS(RFD_ERROR_NULL, "rfd_fit", rfd_fit_array(losses, squares, batch_sizes, SAMPLES, 0, NULL, NULL));
    FAILS(RFD_ERROR_ESTIMATION, "0 distinct", rfd_fit_array(NULL, NULL, NULL, 0, 0, &fit2, NULL));
    char *csv = malloc(SAMPLES * 100), *end = csv;
    CHECK(csv);
    end += sprintf(end, "loss,sq_grad_norm,batchsize\n");
    for (int i = 0; i < SAMPLES; i++) {
        end += sprintf(end, "%.17g,%.17g,%llu\n", losses[i], squares[i], (unsigned long long)batch_sizes[i]);
    }
    write_file(in_folder("samples.csv"), csv);
    free(csv);
    rfd_fit fit3 = {.size = sizeof fit3};
    OK(rfd_fit_csv(in_folder("samples.csv"), 0, &fit3, NULL));
    CHECK(!memcmp(&fit2, &fit3, sizeof fit2));
    FAILS(RFD_ERROR_IO, "nowhere", rfd_fit_csv(in_folder("nowhere"), 0, &fit3, NULL));
    FAILS(RFD_ERROR_NULL, "file", rfd_fit_csv(NULL, 0, &fit3, NULL));
    write_file(in_folder("bad.csv"), "loss,grad_norm,batchsize\n1,2,20\n1,-2,20\n");
    FAILS(RFD_ERROR_FILE, "row 3", rfd_fit_csv(in_folder("bad.csv"), 0, &fit3, NULL));
    FAILS(RFD_ERROR_FILE, "row 3", rfd_statistics_push_csv(other, in_folder("bad.csv")));
    FAILS(RFD_ERROR_NULL, "file", rfd_statistics_push_csv(other, NULL));
    FAILS(RFD_ERROR_NULL, "statistics", rfd_statistics_push_csv(NULL, in_folder("samples.csv")));
    OK(rfd_statistics_push_csv(other, in_folder("samples.csv")));
    OK(rfd_statistics_counts(other, &batches, NULL));
    CHECK(batches == 2 * (SAMPLES - 100) + SAMPLES);

    /* Initialisations that blow up: named, with the fit without them, or left out. */
    rfd_buffer *warnings = NULL;
    OK(rfd_fit_array(losses, squares, batch_sizes, SAMPLES, 0, &fit3, &warnings));
    CHECK(rfd_buffer_size(warnings) == 0);
    rfd_buffer_destroy(warnings);
    warnings = NULL;
    rfd_fit robust = {.size = sizeof robust};
    OK(rfd_fit_array(losses, squares, batch_sizes, SAMPLES, RFD_FIT_ROBUST, &robust, &warnings));
    CHECK(!memcmp(&fit2, &robust, sizeof robust) && rfd_buffer_size(warnings) == 0);
    rfd_buffer_destroy(warnings);
    const double kept[3] = {losses[6], losses[7], losses[8]};
    losses[8] = 1e4;
    FAILS(RFD_ERROR_ESTIMATION, "sample 8 (loss", /* no line goes through it and the others */
          rfd_fit_array(losses, squares, batch_sizes, SAMPLES, 0, &fit3, NULL));
    losses[6] = 1.2e4;
    losses[7] = 1.1e4;
    OK(rfd_fit_array(losses, squares, batch_sizes, SAMPLES, 0, &fit3, &warnings));
    const char *said = (const char *)rfd_buffer_data(warnings);
    CHECK(strstr(said, "3 of 300 samples look foreign: samples 6, 7 and 8 (loss") && strstr(said, "they decide over the fit"));
    CHECK(fit3.variance > 1e4 && fit3.batches == SAMPLES);
    rfd_buffer_destroy(warnings);
    OK(rfd_fit_array(losses, squares, batch_sizes, SAMPLES, RFD_FIT_ROBUST, &fit3, &warnings));
    said = (const char *)rfd_buffer_data(warnings);
    CHECK(strstr(said, "samples 6, 7 and 8 (loss") && strstr(said, "left out of the fit"));
    CHECK(fit3.batches == SAMPLES - 3 && fabs(fit3.variance / fit2.variance - 1) < 0.05);
    rfd_buffer_destroy(warnings);
    warnings = (rfd_buffer *)&robust; /* must stay as it is on errors */
    losses[8] = NAN;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "sample 8",
          rfd_fit_array(losses, squares, batch_sizes, SAMPLES, 0, &fit3, &warnings));
    memcpy(losses + 6, kept, sizeof kept);
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "flags = 2",
          rfd_fit_array(losses, squares, batch_sizes, SAMPLES, 2, &fit3, &warnings));
    CHECK(warnings == (rfd_buffer *)&robust);
    OK(rfd_fit_csv(in_folder("samples.csv"), RFD_FIT_ROBUST, &fit3, &warnings));
    CHECK(!memcmp(&fit2, &fit3, sizeof fit2) && rfd_buffer_size(warnings) == 0);
    rfd_buffer_destroy(warnings);

    uint64_t further = 1;
    OK(rfd_fit_further_examples(&fit, 0.9, &further));
    CHECK(further == 0);
    OK(rfd_fit_further_examples(&fit, 0.001, &further));
    CHECK(further > 1000);
    FAILS(RFD_ERROR_NULL, "rfd_fit", rfd_fit_further_examples(NULL, 0.3, &further));
    FAILS(RFD_ERROR_NULL, "examples", rfd_fit_further_examples(&fit, 0.3, NULL));

    rfd_model *model = NULL;
    OK(rfd_model_create_from_fit("matern:2.5", &fit, 1000, &model));
    rfd_moments m = {.size = sizeof m};
    OK(rfd_model_moments(model, &m));
    CHECK(m.mean == fit.mean && m.noise_grad_variance == fit.noise_grad_variance && m.dims == 1000);
    rfd_model_destroy(model);
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "dims", rfd_model_create_from_fit("se", &fit, 0, &model));
    FAILS(RFD_ERROR_NULL, "rfd_fit", rfd_model_create_from_fit("se", NULL, 1, &model));
    FAILS(RFD_ERROR_NULL, "model", rfd_model_create_from_fit("se", &fit, 1, NULL));

    rfd_buffer *json = NULL;
    OK(rfd_statistics_to_json(statistics, &json));
    rfd_statistics *again = NULL;
    const char *text = (const char *)rfd_buffer_data(json);
    OK(rfd_statistics_from_json(text, rfd_buffer_size(json), &again));
    OK(rfd_statistics_fit(again, &fit2));
    CHECK(!memcmp(&fit, &fit2, sizeof fit));
    rfd_statistics_destroy(again);
    FAILS(RFD_ERROR_FILE, "statistics", rfd_statistics_from_json("{}", 2, &again));
    FAILS(RFD_ERROR_NULL, "statistics", rfd_statistics_from_json(text, 2, NULL));
    FAILS(RFD_ERROR_NULL, "json", rfd_statistics_from_json(NULL, 2, &again));
    FAILS(RFD_ERROR_NULL, "statistics", rfd_statistics_to_json(NULL, &json));
    FAILS(RFD_ERROR_NULL, "json", rfd_statistics_to_json(statistics, NULL));
    rfd_buffer_destroy(json);

    /* Designs. */
    rfd_design *design = NULL, *next = NULL;
    OK(rfd_design_create(0.05, 1.0, 20, 60000, RFD_DESIGN_C_OPTIMAL, &design));
    CHECK(rfd_design_size(design) == 2 && rfd_design_size(NULL) == 0);
    uint64_t small = 0, large = 0, drawn = 0;
    double share = 0, share2 = 0, needed = 0, expected = 0;
    OK(rfd_design_point(design, 0, &small, &share));
    OK(rfd_design_point(design, 1, &large, &share2));
    OK(rfd_design_point(design, 1, NULL, NULL));
    CHECK(small == 20 && large > small && fabs(share + share2 - 1) < 1e-12);
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "index", rfd_design_point(design, 2, &small, &share));
    FAILS(RFD_ERROR_NULL, "design", rfd_design_point(NULL, 0, &small, &share));
    OK(rfd_design_quantile(design, 0.0, &drawn));
    CHECK(drawn == small);
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "u", rfd_design_quantile(design, 1.0, &drawn));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "u", rfd_design_quantile(design, NAN, &drawn));
    FAILS(RFD_ERROR_NULL, "design", rfd_design_quantile(NULL, 0.0, &drawn));
    FAILS(RFD_ERROR_NULL, "batch_size", rfd_design_quantile(design, 0.0, NULL));
    OK(rfd_design_cost(design, 0.3, &needed, &expected));
    CHECK(needed > 100 && expected > 20 && expected < (double)large);
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "tolerance", rfd_design_cost(design, 0, &needed, NULL));
    FAILS(RFD_ERROR_NULL, "design", rfd_design_cost(NULL, 0.3, &needed, NULL));
    OK(rfd_design_after(design, statistics, 1000, &next));
    CHECK(rfd_design_size(next) >= 1);
    FAILS(RFD_ERROR_NULL, "design", rfd_design_after(NULL, statistics, 1000, &next));
    FAILS(RFD_ERROR_NULL, "statistics", rfd_design_after(design, NULL, 1000, &next));
    FAILS(RFD_ERROR_NULL, "next", rfd_design_after(design, statistics, 1000, NULL));
    rfd_design_destroy(next);
    rfd_design_destroy(design);
    rfd_design_destroy(NULL);
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "design", rfd_design_create(0.05, 1.0, 20, 0, 2, &design));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "variance", rfd_design_create(-1, 1.0, 20, 0, 0, &design));
    FAILS(RFD_ERROR_NULL, "design", rfd_design_create(1, 1.0, 20, 0, 0, NULL));

    rfd_statistics_destroy(other);
    rfd_statistics_destroy(statistics);
    rfd_statistics_destroy(NULL);
}

/* Auto-fit. */
typedef struct {
    int samples, reports;
    int fail_at, stop_at, forget_at; /* the callback fails, stops, or writes no loss at this call */
    int exaggerate;                  /* it claims to have evaluated more than it was given */
    int blow_up_at;                  /* one loss in so many is 1e4 */
} user_t;

static int32_t sample(void *user_data, uint64_t batch_size, uint64_t seed, double *loss, double *sq_grad_norm) {
    user_t *user = user_data;
    if (++user->samples == user->fail_at) {
        return 42;
    }
    if (user->samples == user->forget_at) {
        return 0;
    }
    double u = (double)(seed >> 11) / 4503599627370496.0 - 1;
    *loss = 3 + u * sqrt(3 * (0.05 + 1.0 / (double)batch_size));
    *sq_grad_norm = 2 + 100.0 / (double)batch_size;
    if (user->blow_up_at && user->samples % user->blow_up_at == 0) {
        *loss = 1e4;
    }
    return 0;
}

static int32_t sample_many(void *user_data, size_t count, const uint64_t *sizes, const uint64_t *seeds, double *values,
                           double *norms, size_t *done) {
    CHECK(count >= 1 && count <= 16 && *done == 0);
    for (size_t i = 0; i < count; i++) {
        int32_t code = sample(user_data, sizes[i], seeds[i], &values[i], &norms[i]);
        if (code != 0) {
            return code;
        }
        *done = i + 1;
    }
    if (((user_t *)user_data)->exaggerate) {
        *done = count + 1;
    }
    return 0;
}

static int32_t progress(void *user_data, const rfd_progress *now) {
    user_t *user = user_data;
    CHECK(now->size == sizeof *now && now->tolerance == 0.3 && now->batches == (uint64_t)user->samples);
    CHECK(user->reports > 0 || (isnan(now->relative_std) && now->needed == 0));
    /* What it will take is said before anything is drawn, and how long from the first sample on. */
    CHECK(now->expected >= 6000 && now->expected >= now->examples && now->expected <= 1000000);
    CHECK(now->needed == 0 || now->expected == (now->needed > now->examples ? now->needed : now->examples));
    CHECK(user->samples == 0 || user->fail_at || user->stop_at || now->remaining_seconds >= 0);
    CHECK(user->samples > 0 || isnan(now->remaining_seconds));
    return ++user->reports == user->stop_at ? 1 : 0;
}

static void auto_fit(void) {
    rfd_auto_fit_options options;
    OK(rfd_auto_fit_options_init(&options, sizeof options));
    CHECK(options.tolerance == 0.3 && options.max_budget == 1000000 && !options.cache);
    FAILS(RFD_ERROR_NULL, "rfd_auto_fit_options", rfd_auto_fit_options_init(NULL, sizeof options));
    FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_auto_fit_options", rfd_auto_fit_options_init(&options, 8));
    rfd_fit fit = {.size = sizeof fit}, resumed = {.size = sizeof resumed};
    rfd_statistics *statistics = NULL;
    rfd_buffer *warnings = NULL;

    user_t user = {0};
    OK(rfd_auto_fit(&options, 1000, sample, progress, &user, &fit, &statistics, &warnings));
    CHECK(user.samples > 100 && user.reports == user.samples + 1 && fit.relative_std < 0.3);
    CHECK(rfd_buffer_size(warnings) == 0);
    uint64_t batches = 0;
    OK(rfd_statistics_counts(statistics, &batches, NULL));
    CHECK(batches == fit.batches && batches == (uint64_t)user.samples);
    rfd_statistics_destroy(statistics);
    rfd_buffer_destroy(warnings);
    statistics = NULL;
    warnings = NULL;

    /* Errors and stops in the middle leave outputs alone, and the cache keeps what was drawn. */
    static char cache[5000];
    strcpy(cache, in_folder("cache.csv"));
    options.cache = cache;
    resumed.mean = 5;
    user_t failing = {.fail_at = 60};
    FAILS(RFD_ERROR_CALLBACK, "returned 42",
          rfd_auto_fit(&options, 1000, sample, progress, &failing, &resumed, &statistics, &warnings));
    CHECK(strstr(rfd_last_error(), "cache.csv"));
    user_t stopping = {.samples = 59, .stop_at = 10};
    FAILS(RFD_ERROR_STOPPED, "stopped",
          rfd_auto_fit(&options, 1000, sample, progress, &stopping, &resumed, &statistics, &warnings));
    CHECK(stopping.samples == 59 + 9);
    user_t forgetting = {.forget_at = 3};
    FAILS(RFD_ERROR_ESTIMATION, "loss",
          rfd_auto_fit(&options, 1000, sample, NULL, &forgetting, &resumed, &statistics, &warnings));
    CHECK(resumed.mean == 5 && !statistics && !warnings);
    user_t rest = {0};
    OK(rfd_auto_fit(&options, 1000, sample, NULL, &rest, &resumed, NULL, NULL));
    CHECK(rest.samples == user.samples - 59 - 9 - 2);
    CHECK(resumed.batches == fit.batches && fabs(resumed.variance / fit.variance - 1) < 1e-9);

    /* Up to 16 at once: the same samples, of which those before a failure are kept. */
    strcpy(cache, in_folder("many.csv"));
    resumed = (rfd_fit){.size = sizeof resumed};
    user_t breaking = {.fail_at = 60};
    FAILS(RFD_ERROR_CALLBACK, "returned 42",
          rfd_auto_fit_many(&options, 1000, 16, sample_many, progress, &breaking, &resumed, NULL, NULL));
    CHECK(resumed.batches == 0);
    rest = (user_t){0};
    OK(rfd_auto_fit_many(&options, 1000, 16, sample_many, NULL, &rest, &resumed, NULL, NULL));
    CHECK(rest.samples == user.samples - 59 && resumed.batches == fit.batches);
    CHECK(fabs(resumed.variance / fit.variance - 1) < 1e-9);
    options.cache = NULL;
    user_t exaggerating = {.exaggerate = 1};
    FAILS(RFD_ERROR_CALLBACK, "*done = 17, but was given count = 16",
          rfd_auto_fit_many(&options, 1000, 16, sample_many, NULL, &exaggerating, &resumed, NULL, NULL));
    FAILS(RFD_ERROR_NULL, "sample", rfd_auto_fit_many(NULL, 1000, 16, NULL, NULL, NULL, &resumed, NULL, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "most_at_once",
          rfd_auto_fit_many(NULL, 1000, 0, sample_many, NULL, &rest, &resumed, NULL, NULL));

    /* One loss in forty is 1e4. */
    CHECK(options.on_foreign == RFD_FOREIGN_REFUSE);
    user_t blowing = {.blow_up_at = 40};
    resumed = (rfd_fit){.size = sizeof resumed};
    FAILS(RFD_ERROR_ESTIMATION, "looks foreign: sample 39 (loss",
          rfd_auto_fit(&options, 1000, sample, NULL, &blowing, &resumed, NULL, NULL));
    CHECK(resumed.batches == 0);
    options.on_foreign = RFD_FOREIGN_LEAVE_OUT;
    blowing = (user_t){.blow_up_at = 40};
    OK(rfd_auto_fit(&options, 1000, sample, NULL, &blowing, &resumed, &statistics, &warnings));
    CHECK(strstr((const char *)rfd_buffer_data(warnings), "left out of the fit"));
    CHECK(resumed.batches == (uint64_t)(blowing.samples - blowing.samples / 40));
    CHECK(resumed.variance > 0.02 && resumed.variance < 0.1 && resumed.relative_std < 0.3);
    OK(rfd_statistics_counts(statistics, &batches, NULL));
    CHECK(batches == resumed.batches); /* those that were fitted */
    rfd_statistics_destroy(statistics);
    rfd_buffer_destroy(warnings);
    options.on_foreign = RFD_FOREIGN_KEEP;
    options.max_budget = 50000;
    blowing = (user_t){.blow_up_at = 40};
    OK(rfd_auto_fit(&options, 1000, sample, NULL, &blowing, &resumed, NULL, &warnings));
    CHECK(strstr((const char *)rfd_buffer_data(warnings), "part of the fit") && resumed.variance > 1e4);
    rfd_buffer_destroy(warnings);
    options.on_foreign = 3;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "on_foreign = 3",
          rfd_auto_fit(&options, 1, sample, NULL, &rest, &fit, NULL, NULL));
    options.on_foreign = RFD_FOREIGN_REFUSE;

    options.cache = NULL;
    options.max_budget = 7000;
    options.tolerance = 0.001;
    OK(rfd_auto_fit(&options, 1000, sample, NULL, &rest, &fit, NULL, &warnings));
    CHECK(strstr((const char *)rfd_buffer_data(warnings), "max_budget"));
    rfd_buffer_destroy(warnings);
    options.tolerance = 0;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "tolerance", rfd_auto_fit(&options, 1, sample, NULL, &rest, &fit, NULL, NULL));
    OK(rfd_auto_fit_options_init(&options, sizeof options));
    options.design = 9;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "design", rfd_auto_fit(&options, 1, sample, NULL, &rest, &fit, NULL, NULL));
    options.size = 4;
    FAILS(RFD_ERROR_STRUCT_SIZE, "options", rfd_auto_fit(&options, 1, sample, NULL, &rest, &fit, NULL, NULL));
    FAILS(RFD_ERROR_NULL, "sample", rfd_auto_fit(NULL, 1, NULL, NULL, NULL, &fit, NULL, NULL));
    FAILS(RFD_ERROR_NULL, "rfd_fit", rfd_auto_fit(NULL, 1, sample, NULL, &rest, NULL, NULL, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "dims", rfd_auto_fit(NULL, 0, sample, NULL, &rest, &fit, NULL, NULL));
}

/* Optimizers. */
static rfd_tensor tensor(void *data, size_t count, uint32_t dtype) {
    return (rfd_tensor){.size = sizeof(rfd_tensor), .data = data, .count = count, .dtype = dtype};
}

static rfd_gradient gradient_at(const void *data, size_t count, uint32_t dtype) {
    return (rfd_gradient){.size = sizeof(rfd_gradient), .data = data, .count = count, .dtype = dtype};
}

static rfd_tensor_spec spec(const char *name, const uint64_t *shape, uint32_t rank, uint32_t dtype) {
    return (rfd_tensor_spec){
        .size = sizeof(rfd_tensor_spec), .name = name, .shape = shape, .rank = rank, .dtype = dtype};
}

static rfd_step_input input(double loss) {
    rfd_step_input scalars;
    OK(rfd_step_input_init(&scalars, sizeof scalars));
    scalars.loss = loss;
    return scalars;
}

static void creation(void) {
    rfd_model *model = new_model();
    const uint64_t shape[] = {2, 3}, huge[] = {1ull << 40, 1ull << 40};
    rfd_tensor_spec specs[] = {spec("w", shape, 2, RFD_DTYPE_F32), spec("b", shape, 1, RFD_DTYPE_F64)};
    rfd_optimizer_options options;
    rfd_optimizer *optimizer = NULL;
    FAILS(RFD_ERROR_NULL, "rfd_optimizer_options", rfd_optimizer_options_init(NULL, sizeof options));
    FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_optimizer_options", rfd_optimizer_options_init(&options, sizeof options + 8));
    OK(rfd_optimizer_options_init(&options, sizeof options));
    CHECK(options.multiplier == 1 && isinf(options.max_step_size) && options.device_kind == RFD_DEVICE_CPU);
    rfd_fitted fitted;
    FAILS(RFD_ERROR_NULL, "rfd_fitted", rfd_fitted_init(NULL, sizeof fitted));
    FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_fitted", rfd_fitted_init(&fitted, sizeof fitted + 8));
    OK(rfd_fitted_init(&fitted, sizeof fitted));
    CHECK(!fitted.model && fitted.mode == RFD_MODE_RFD && fitted.momentum == 0 && !fitted.group_momentum);

#define CREATE() rfd_fitted_optimizer_create(&fitted, &options, specs, 2, &optimizer)
    FAILS(RFD_ERROR_NULL, "model", CREATE());
    fitted.model = model;
    FAILS(RFD_ERROR_NULL, "rfd_fitted", rfd_fitted_optimizer_create(NULL, &options, specs, 2, &optimizer));
    FAILS(RFD_ERROR_NULL, "specs", rfd_fitted_optimizer_create(&fitted, &options, NULL, 2, &optimizer));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_fitted_optimizer_create(&fitted, &options, specs, 2, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "memory",
          rfd_fitted_optimizer_create(&fitted, NULL, specs, SIZE_MAX / 2, &optimizer));
    fitted.size = 8;
    FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_fitted", CREATE());
    fitted.size = sizeof fitted;
    specs[1].name = "w";
    FAILS(RFD_ERROR_TENSOR, "listed twice", CREATE());
    specs[1].name = NULL;
    FAILS(RFD_ERROR_NULL, "name", CREATE());
    specs[1].name = "b";
    specs[1].dtype = 4;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "tensor `b`: dtype", CREATE());
    specs[1].dtype = RFD_DTYPE_F64;
    specs[1].flags = 4;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "flags", CREATE());
    specs[1].flags = RFD_TENSOR_NOT_IN_NORM;
    specs[1].group = 1;
    FAILS(RFD_ERROR_TENSOR, "group 1", CREATE());
    specs[1].group = 0;
    specs[1].shape = NULL;
    FAILS(RFD_ERROR_NULL, "tensor `b`: shape", CREATE());
    specs[1].shape = huge;
    specs[1].rank = 2;
    FAILS(RFD_ERROR_TENSOR, "too large", CREATE());
    specs[1].shape = shape;
    specs[1].size = 8;
    FAILS(RFD_ERROR_STRUCT_SIZE, "index 1", CREATE());
    specs[1].size = specs[0].size = sizeof *specs - 4;
    FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_tensor_spec", CREATE());
    specs[1].size = specs[0].size = sizeof *specs;

    options.size = 16;
    FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_optimizer_options", CREATE());
    OK(rfd_optimizer_options_init(&options, sizeof options));
    options.multiplier = -1;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "multiplier", CREATE());
    options.multiplier = 1;
    options.max_step_size = 0;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "max_step_size", CREATE());
    options.max_step_size = INFINITY;
    fitted.mode = 7;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "mode", CREATE());
    fitted.mode = RFD_MODE_A_RFD;
    fitted.conservatism = 0.5;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "conservatism", CREATE());
    fitted.conservatism = 0;
    fitted.inv_batch_size = -1;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "inv_batch_size", CREATE());
    fitted.inv_batch_size = 0;
    fitted.momentum = 1;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "momentum", CREATE());
    fitted.momentum = 0;
    const double by_group[] = {NAN, 0.9};
    fitted.group_momentum_count = 2;
    FAILS(RFD_ERROR_NULL, "group_momentum", CREATE());
    fitted.group_momentum = by_group;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "length of momentum = 2: there are 1 groups", CREATE());
    fitted.group_momentum_count = 1;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "momentum[0]", CREATE());
    fitted.group_momentum_count = 0; /* then the numbers are not looked at */
    options.flags = 8;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "flags", CREATE());
    options.flags = 0;
    options.device_kind = 77;
    CHECK(CREATE() != RFD_OK);
    CHECK(strstr(rfd_last_error(), "device_kind"));
    options.device_kind = RFD_DEVICE_CPU;
    options.device_index = 1;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "device_index", CREATE());
    options.device_index = 0;
    options.group_count = 1;
    FAILS(RFD_ERROR_NULL, "groups", CREATE());
    rfd_group group;
    OK(rfd_group_init(&group, sizeof group));
    FAILS(RFD_ERROR_NULL, "rfd_group", rfd_group_init(NULL, sizeof group));
    FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_group", rfd_group_init(&group, 0));
    options.groups = &group;
    group.weight_decay = -1;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "groups[0].weight_decay", CREATE());
    group.weight_decay = 0;
    group.flags = 6;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "rfd_group.flags", CREATE());
    CHECK(!optimizer);

    options.device_kind = RFD_DEVICE_CUDA; /* here or not, no crash */
    group.flags = 0;
    rfd_status status = CREATE();
    CHECK(status == RFD_OK || status == RFD_ERROR_DEVICE || status == RFD_ERROR_UNSUPPORTED);
    rfd_optimizer_destroy(optimizer);
    rfd_optimizer_destroy(NULL);
    rfd_optimizer_destroy(NULL);
    rfd_model_destroy(model);
}

static void steps(void) {
    rfd_model *model = new_model();
    const uint64_t six[] = {6}, none[] = {0};
    const rfd_tensor_spec specs[] = {spec("w", six, 1, RFD_DTYPE_F32), spec("empty", none, 1, RFD_DTYPE_F32),
                                     spec("b", NULL, 0, RFD_DTYPE_F64)};
    rfd_optimizer *optimizer = NULL;
    OK(rfd_fitted_optimizer_create(FITTED(model), NULL, specs, 3, &optimizer));
    rfd_model_destroy(model); /* the optimizer keeps what it needs */

    union {
        float f[16];
        double d[8];
        char bytes[64];
    } memory = {.f = {1, 2, 3, 4, 5, 6}};
    float gradient[6] = {1, 0, 0, 0, 2, 0};
    double b = 0.5, b_gradient = 2;
    rfd_tensor params[] = {tensor(memory.f, 6, RFD_DTYPE_F32), tensor(NULL, 0, RFD_DTYPE_F32),
                           tensor(&b, 1, RFD_DTYPE_F64)};
    rfd_gradient grads[] = {gradient_at(gradient, 6, RFD_DTYPE_F32), gradient_at(NULL, 0, RFD_DTYPE_F32),
                          gradient_at(&b_gradient, 1, RFD_DTYPE_F64)};
    rfd_step_input scalars = input(2.0);
    rfd_step_report report = {.size = sizeof report}, status = {.size = sizeof status};
    OK(rfd_optimizer_report(optimizer, &status));
    CHECK(status.outcome == RFD_OUTCOME_NONE && status.applied_steps == 0);

#define STEP() rfd_optimizer_step(optimizer, params, grads, 3, &scalars, NULL, &report)
    OK(STEP());
    CHECK(report.outcome == RFD_OUTCOME_APPLIED && report.grad_norm == 3 && report.applied_steps == 1);
    CHECK(memory.f[0] < 1 && memory.f[1] == 2 && b < 0.5);
    OK(rfd_optimizer_report(optimizer, &status));
    CHECK(!memcmp(&status, &report, sizeof status));
    OK(rfd_optimizer_wait_report(optimizer, NULL, &status));
    CHECK(!memcmp(&status, &report, sizeof status));

    /* A failed call changes nothing, not even the report; nor does a check, which refuses the same. */
#define CHECK_STEP() rfd_optimizer_check_step(optimizer, params, grads, 3, &scalars, NULL)
    float before[6];
    memcpy(before, memory.f, sizeof before);
    rfd_step_report untouched = report;
    OK(CHECK_STEP());
    CHECK(!memcmp(before, memory.f, sizeof before));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_check_step(NULL, params, grads, 3, &scalars, NULL));
    FAILS(RFD_ERROR_NULL, "params", rfd_optimizer_check_step(optimizer, NULL, grads, 3, &scalars, NULL));
    FAILS(RFD_ERROR_NULL, "grads", rfd_optimizer_check_step(optimizer, params, NULL, 3, &scalars, NULL));
    FAILS(RFD_ERROR_NULL, "rfd_step_input", rfd_optimizer_check_step(optimizer, params, grads, 3, NULL, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "number of params", rfd_optimizer_check_step(optimizer, params, grads, 2, &scalars, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "stream", rfd_optimizer_check_step(optimizer, params, grads, 3, &scalars, &b));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_step(NULL, params, grads, 3, &scalars, NULL, &report));
    FAILS(RFD_ERROR_NULL, "params", rfd_optimizer_step(optimizer, NULL, grads, 3, &scalars, NULL, &report));
    FAILS(RFD_ERROR_NULL, "grads", rfd_optimizer_step(optimizer, params, NULL, 3, &scalars, NULL, &report));
    FAILS(RFD_ERROR_NULL, "rfd_step_input", rfd_optimizer_step(optimizer, params, grads, 3, NULL, NULL, &report));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "number of params", rfd_optimizer_step(optimizer, params, grads, 2, &scalars, NULL, &report));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "number of params",
          rfd_optimizer_step(optimizer, NULL, NULL, 0, &scalars, NULL, &report));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "stream", rfd_optimizer_step(optimizer, params, grads, 3, &scalars, &b, &report));
    report.size = 24;
    FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_step_report", STEP());
    report.size = sizeof report;
    scalars.size = 16;
    FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_step_input", STEP());
    scalars.size = sizeof scalars;
    scalars.grad_scale = 0;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "grad_scale", STEP());
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "grad_scale", CHECK_STEP());
    scalars.grad_scale = 1;
    scalars.loss_address = &b;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "loss = address", STEP());
    scalars.loss_address = NULL;
    scalars.found_inf_address = gradient;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "found_inf = address", STEP());
    scalars.found_inf_address = NULL;

#define WITH(one, value, expected, text)     \
    do {                                     \
        const one##_TYPE old = one##_AT;     \
        one##_AT.value;                      \
        FAILS(expected, text, STEP());       \
        FAILS(expected, text, CHECK_STEP()); \
        one##_AT = old;                      \
    } while (0)
#define W_TYPE rfd_tensor
#define W_AT params[0]
#define G_TYPE rfd_gradient
#define G_AT grads[0]
    WITH(W, data = NULL, RFD_ERROR_TENSOR, "tensor `w`: its parameter is null");
    WITH(W, dtype = RFD_DTYPE_F16, RFD_ERROR_TENSOR, "f16");
    WITH(W, dtype = 99, RFD_ERROR_INVALID_ARGUMENT, "tensor `w`, parameter: dtype");
    WITH(G, dtype = 99, RFD_ERROR_INVALID_ARGUMENT, "tensor `w`, gradient: dtype");
    WITH(W, count = 5, RFD_ERROR_TENSOR, "6 elements");
    WITH(G, count = 5, RFD_ERROR_TENSOR, "`w`");
    WITH(W, count = UINT64_MAX, RFD_ERROR_TENSOR, "6 elements");
    WITH(W, count = UINT64_MAX / 4, RFD_ERROR_TENSOR, "6 elements");
    WITH(W, device_kind = RFD_DEVICE_CUDA, RFD_ERROR_TENSOR, "tensor `w`");
    WITH(W, device_index = 1, RFD_ERROR_TENSOR, "index 1");
    WITH(G, device_kind = RFD_DEVICE_CUDA, RFD_ERROR_TENSOR, "its gradient");
    WITH(W, data = memory.bytes + 2, RFD_ERROR_TENSOR, "aligned");
    WITH(G, data = (const char *)gradient + 1, RFD_ERROR_TENSOR, "aligned");
    WITH(W, size = 8, RFD_ERROR_STRUCT_SIZE, "rfd_tensor");
    WITH(G, size = 8, RFD_ERROR_STRUCT_SIZE, "rfd_gradient");
    /* Overlaps: parameter and gradient in whole and in part, two parameters. */
    WITH(G, data = memory.f, RFD_ERROR_TENSOR, "shares memory");
    WITH(G, data = memory.f + 5, RFD_ERROR_TENSOR, "shares memory");
    params[2].data = &memory.d[2];
    FAILS(RFD_ERROR_TENSOR, "`b`: its parameter shares memory with the parameter of `w`", STEP());
    params[2].data = &b;
    CHECK(!memcmp(before, memory.f, sizeof before) && !memcmp(&report, &untouched, sizeof report));

    /* Beside each other is no overlap, and gradients may share. */
    grads[0].data = memory.f + 6;
    OK(STEP());
    grads[0].data = gradient;

    /* Skipped steps. */
    scalars.loss = NAN;
    OK(STEP());
    CHECK(report.outcome == RFD_OUTCOME_NON_FINITE_LOSS && report.skipped_steps == 1);
    scalars.loss = 2.0;
    scalars.found_inf = 2;
    OK(STEP());
    CHECK(report.outcome == RFD_OUTCOME_FOUND_INF);
    scalars.found_inf = 0;
    gradient[3] = INFINITY;
    OK(STEP());
    CHECK(report.outcome == RFD_OUTCOME_NON_FINITE_GRADIENT);
    memset(gradient, 0, sizeof gradient);
    b_gradient = 0;
    OK(STEP());
    CHECK(report.outcome == RFD_OUTCOME_ZERO_GRADIENT && report.skipped_steps == 4);
    grads[0].data = NULL; /* missing */
    b_gradient = 1;
    memcpy(before, memory.f, sizeof before);
    OK(STEP());
    CHECK(report.outcome == RFD_OUTCOME_APPLIED && report.grad_norm == 1);
    CHECK(!memcmp(before, memory.f, sizeof before));
    grads[0].data = gradient;
    OK(rfd_optimizer_step(optimizer, params, grads, 3, &scalars, NULL, NULL));

    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_report(NULL, &status));
    FAILS(RFD_ERROR_NULL, "rfd_step_report", rfd_optimizer_report(optimizer, NULL));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_wait_report(NULL, NULL, &status));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "stream", rfd_optimizer_wait_report(optimizer, &b, &status));
    status.size = 0;
    FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_step_report", rfd_optimizer_report(optimizer, &status));
    FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_step_report", rfd_optimizer_wait_report(optimizer, NULL, &status));
    FAILS(RFD_ERROR_NULL, "rfd_step_input", rfd_step_input_init(NULL, sizeof scalars));
    FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_step_input", rfd_step_input_init(&scalars, 1));

    /* A loss that was forgotten is named by the report, whatever the method. */
    rfd_optimizer *adaptive = NULL;
    OK(rfd_adaptive_optimizer_create(NULL, NULL, specs, 3, &adaptive));
    OK(rfd_step_input_init(&scalars, sizeof scalars));
    CHECK(isnan(scalars.loss) && scalars.grad_scale == 1 && scalars.found_inf == 0);
    memcpy(before, memory.f, sizeof before);
    report.outcome = RFD_OUTCOME_NONE;
    OK(STEP());
    CHECK(report.outcome == RFD_OUTCOME_NON_FINITE_LOSS);
    OK(rfd_optimizer_step(adaptive, params, grads, 3, &scalars, NULL, &report));
    CHECK(report.outcome == RFD_OUTCOME_NON_FINITE_LOSS && report.skipped_steps == 1);
    CHECK(!memcmp(before, memory.f, sizeof before));
    rfd_optimizer_destroy(adaptive);
    rfd_optimizer_destroy(optimizer);

    /* No tensors at all. */
    model = new_model();
    OK(rfd_fitted_optimizer_create(FITTED(model), NULL, NULL, 0, &optimizer));
    scalars = input(2.0);
    OK(rfd_optimizer_step(optimizer, NULL, NULL, 0, &scalars, NULL, &report));
    CHECK(report.outcome == RFD_OUTCOME_ZERO_GRADIENT);
    rfd_optimizer_destroy(optimizer);
    rfd_model_destroy(model);
}

static void settings_and_states(void) {
    rfd_model *model = new_model();
    const uint64_t four[] = {4};
    rfd_tensor_spec specs[] = {spec("a", four, 1, RFD_DTYPE_BF16), spec("b", four, 1, RFD_DTYPE_F32)};
    specs[1].group = 1;
    rfd_group groups[2];
    OK(rfd_group_init(&groups[0], sizeof groups[0]));
    groups[1] = groups[0];
    const double momentum[] = {0.9, 0};
    rfd_fitted fitted = {.size = sizeof fitted, .model = model, .group_momentum = momentum, .group_momentum_count = 2};
    rfd_optimizer_options options;
    OK(rfd_optimizer_options_init(&options, sizeof options));
    options.groups = groups;
    options.group_count = 2;
    options.flags = RFD_OPTIMIZER_MASTER_WEIGHTS;
    rfd_optimizer *first = NULL, *second = NULL;
    OK(rfd_fitted_optimizer_create(&fitted, &options, specs, 2, &first));
    OK(rfd_fitted_optimizer_create(&fitted, &options, specs, 2, &second));
    uint16_t a[] = {0x3f80, 0x3f80, 0, 0x4000}, a2[4]; /* 1, 1, 0, 2 */
    float b[] = {1, 1, 1, 1}, b2[4], g[] = {0.1f, 0.2f, 0.3f, 0.4f};
    rfd_tensor params[] = {tensor(a, 4, RFD_DTYPE_BF16), tensor(b, 4, RFD_DTYPE_F32)};
    rfd_gradient grads[] = {gradient_at(g, 4, RFD_DTYPE_F32), gradient_at(g, 4, RFD_DTYPE_F32)};
    rfd_step_input scalars = input(2.0);
    rfd_step_report report = {.size = sizeof report}, report2 = {.size = sizeof report2};
    OK(rfd_optimizer_init_master_weights(first, params, 2, NULL));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_init_master_weights(NULL, params, 2, NULL));
    FAILS(RFD_ERROR_NULL, "params", rfd_optimizer_init_master_weights(first, NULL, 2, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "stream", rfd_optimizer_init_master_weights(first, params, 2, g));
    OK(rfd_optimizer_step(first, params, grads, 2, &scalars, NULL, &report));
    memcpy(a2, a, sizeof a);
    memcpy(b2, b, sizeof b);

    /* Another optimizer goes on from the state bit for bit: from memory, then from a file. */
    rfd_buffer *state = NULL;
    OK(rfd_optimizer_get_state(first, NULL, &state));
    CHECK(rfd_buffer_size(state) > 100);
    OK(rfd_optimizer_set_state(second, rfd_buffer_data(state), rfd_buffer_size(state), NULL));
    rfd_tensor params2[] = {tensor(a2, 4, RFD_DTYPE_BF16), tensor(b2, 4, RFD_DTYPE_F32)};
    for (int round = 0; round < 2; round++) {
        OK(rfd_optimizer_step(first, params, grads, 2, &scalars, NULL, &report));
        OK(rfd_optimizer_step(second, params2, grads, 2, &scalars, NULL, &report2));
        CHECK(!memcmp(&report, &report2, sizeof report));
        CHECK(!memcmp(a, a2, sizeof a) && !memcmp(b, b2, sizeof b));
        OK(rfd_optimizer_save_state(first, in_folder("state.safetensors"), NULL));
        OK(rfd_optimizer_load_state(second, in_folder("state.safetensors"), NULL));
    }
    /* One that is cut off, or of other tensors, changes nothing. */
    FAILS(RFD_ERROR_STATE, "state", rfd_optimizer_set_state(second, rfd_buffer_data(state), 50, NULL));
    FAILS(RFD_ERROR_STATE, "state", rfd_optimizer_set_state(second, NULL, 0, NULL));
    FAILS(RFD_ERROR_NULL, "state", rfd_optimizer_set_state(second, NULL, 5, NULL));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_set_state(NULL, g, 5, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "stream", rfd_optimizer_set_state(second, g, 5, g));
    FAILS(RFD_ERROR_NULL, "state", rfd_optimizer_get_state(second, NULL, NULL));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_get_state(NULL, NULL, &state));
    FAILS(RFD_ERROR_IO, "nowhere", rfd_optimizer_load_state(second, in_folder("nowhere"), NULL));
    FAILS(RFD_ERROR_IO, "nowhere", rfd_optimizer_save_state(second, in_folder("nowhere/state"), NULL));
    FAILS(RFD_ERROR_NULL, "file", rfd_optimizer_load_state(second, NULL, NULL));
    FAILS(RFD_ERROR_NULL, "file", rfd_optimizer_save_state(second, NULL, NULL));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_load_state(NULL, folder, NULL));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_save_state(NULL, folder, NULL));
    rfd_optimizer *other = NULL;
    specs[0].name = "c";
    OK(rfd_fitted_optimizer_create(&fitted, &options, specs, 2, &other));
    FAILS(RFD_ERROR_STATE, "`c`", rfd_optimizer_set_state(other, rfd_buffer_data(state), rfd_buffer_size(state), NULL));
    rfd_optimizer_destroy(other);
    rfd_buffer_destroy(state);

    /* Settings: half the multiplier is half the step; weight decay moves what has no gradient of its own. */
    OK(rfd_optimizer_step(first, params, grads, 2, &scalars, NULL, &report));
    OK(rfd_optimizer_set_multiplier(first, 0.5, NULL));
    OK(rfd_optimizer_step(first, params, grads, 2, &scalars, NULL, &report2));
    CHECK(report2.step_size == 0.5 * report.step_size);
    fitted.inv_batch_size = 1.0 / 64;
    fitted.model = NULL; /* the optimizer's own, which must be the same where it is given */
    OK(rfd_optimizer_set_fitted(first, &fitted, NULL));
    fitted.model = model;
    OK(rfd_optimizer_set_fitted(first, &fitted, NULL));
    OK(rfd_optimizer_step(first, params, grads, 2, &scalars, NULL, &report));
    CHECK(report.step_size != report2.step_size);
    rfd_fitted wrong = fitted;
    wrong.inv_batch_size = 2;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "inv_batch_size", rfd_optimizer_set_fitted(first, &wrong, NULL));
    wrong.inv_batch_size = 0;
    wrong.group_momentum_count = 1; /* 0.9 for both */
    OK(rfd_optimizer_set_fitted(first, &wrong, NULL));
    wrong.group_momentum = (const double[]){0, 0, 0};
    wrong.group_momentum_count = 3;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "momentum", rfd_optimizer_set_fitted(first, &wrong, NULL));
    wrong.group_momentum_count = 0;
    wrong.mode = RFD_MODE_A_RFD;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "mode", rfd_optimizer_set_fitted(first, &wrong, NULL));
    wrong.mode = RFD_MODE_RFD;
    wrong.conservatism = 0.1;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "conservatism", rfd_optimizer_set_fitted(first, &wrong, NULL));
    wrong.conservatism = 0;
    rfd_model *unlike = NULL;
    rfd_moments more = moments();
    more.mean += 1;
    OK(rfd_model_create("squared_exponential", &more, &unlike));
    wrong.model = unlike;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "model", rfd_optimizer_set_fitted(first, &wrong, NULL));
    rfd_model_destroy(unlike);
    FAILS(RFD_ERROR_NULL, "rfd_fitted", rfd_optimizer_set_fitted(first, NULL, NULL));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_set_fitted(NULL, &fitted, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "stream", rfd_optimizer_set_fitted(first, &fitted, g));
    OK(rfd_optimizer_set_weight_decay(first, 1, 0.01, NULL));
    OK(rfd_optimizer_set_group(first, 0, &groups[1], NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "multiplier", rfd_optimizer_set_multiplier(first, NAN, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "weight_decay", rfd_optimizer_set_weight_decay(first, 1, -1, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "group", rfd_optimizer_set_weight_decay(first, 2, 0, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "group", rfd_optimizer_set_group(first, 2, groups, NULL));
    FAILS(RFD_ERROR_NULL, "rfd_group", rfd_optimizer_set_group(first, 0, NULL, NULL));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_set_group(NULL, 0, groups, NULL));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_set_multiplier(NULL, 1, NULL));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_set_weight_decay(NULL, 0, 0, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "stream", rfd_optimizer_set_multiplier(first, 1, g));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "stream", rfd_optimizer_set_weight_decay(first, 0, 0, g));
    rfd_optimizer_destroy(first);
    rfd_optimizer_destroy(second);

    /* The split form is the whole step where there is one rank; both halves need what they need. */
    specs[0].name = "a";
    OK(rfd_fitted_optimizer_create(&fitted, &options, specs, 2, &first));
    OK(rfd_fitted_optimizer_create(&fitted, &options, specs, 2, &second));
    memcpy(a2, a, sizeof a);
    memcpy(b2, b, sizeof b);
    double *sums = NULL, two[2];
    size_t len = 0;
    OK(rfd_optimizer_sums_len(second, &len));
    CHECK(len == 2);
    OK(rfd_optimizer_local_sums(second, params2, grads, 2, &scalars, NULL, &sums));
    memcpy(two, sums, sizeof two);
    CHECK(two[0] > 0.59 && two[0] < 0.61 && two[0] == two[1]);
    OK(rfd_optimizer_step(first, params, grads, 2, &scalars, NULL, &report));
    OK(rfd_optimizer_step_with_sums(second, params2, grads, 2, sums, &scalars, NULL, &report2));
    CHECK(!memcmp(&report, &report2, sizeof report) && !memcmp(a, a2, sizeof a) && !memcmp(b, b2, sizeof b));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "no first half",
          rfd_optimizer_step_with_sums(second, params2, grads, 2, two, &scalars, NULL, NULL));
    OK(rfd_optimizer_local_sums(second, params2, grads, 2, &scalars, NULL, &sums));
    sums[0] = sums[1] = NAN;
    OK(rfd_optimizer_step_with_sums(second, params2, grads, 2, sums, &scalars, NULL, NULL));
    OK(rfd_optimizer_report(second, &report2));
    CHECK(report2.outcome == RFD_OUTCOME_NON_FINITE_GRADIENT);
    FAILS(RFD_ERROR_NULL, "sums", rfd_optimizer_local_sums(second, params2, grads, 2, &scalars, NULL, NULL));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_local_sums(NULL, params2, grads, 2, &scalars, NULL, &sums));
    FAILS(RFD_ERROR_NULL, "grads", rfd_optimizer_local_sums(second, params2, NULL, 2, &scalars, NULL, &sums));
    FAILS(RFD_ERROR_NULL, "rfd_step_input", rfd_optimizer_local_sums(second, params2, grads, 2, NULL, NULL, &sums));
    FAILS(RFD_ERROR_NULL, "sums", rfd_optimizer_step_with_sums(second, params2, grads, 2, NULL, &scalars, NULL, NULL));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_step_with_sums(NULL, params2, grads, 2, two, &scalars, NULL, NULL));
    FAILS(RFD_ERROR_NULL, "len", rfd_optimizer_sums_len(second, NULL));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_sums_len(NULL, &len));
    groups[1].flags = RFD_GROUP_NORM_LOCK;
    OK(rfd_optimizer_set_group(second, 1, &groups[1], NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "norm_lock",
          rfd_optimizer_local_sums(second, params2, grads, 2, &scalars, NULL, &sums));
    rfd_optimizer_destroy(first);
    rfd_optimizer_destroy(second);

    /* A velocity is kept in float. */
    double vast = 1e100;
    rfd_tensor_spec scalar = spec("s", NULL, 0, RFD_DTYPE_F32);
    rfd_tensor param = tensor(b, 1, RFD_DTYPE_F32);
    rfd_gradient grad = gradient_at(&vast, 1, RFD_DTYPE_F64);
    options.group_count = fitted.group_momentum_count = 1;
    OK(rfd_fitted_optimizer_create(&fitted, &options, &scalar, 1, &first));
    OK(rfd_optimizer_step(first, &param, &grad, 1, &scalars, NULL, &report));
    CHECK(report.outcome == RFD_OUTCOME_OUT_OF_RANGE);
    FAILS(RFD_ERROR_FILE, "regular", rfd_optimizer_load_state(first, folder, NULL));
    rfd_optimizer_destroy(first);
    rfd_model_destroy(model);
}

/* The adaptive method: its settings, what it refuses, and that a state goes on bit for bit. */
static void adaptive(void) {
    const uint64_t four[] = {4};
    const rfd_tensor_spec specs[] = {spec("a", four, 1, RFD_DTYPE_BF16), spec("b", four, 1, RFD_DTYPE_F64)};
    rfd_adaptive settings;
    FAILS(RFD_ERROR_NULL, "rfd_adaptive", rfd_adaptive_init(NULL, sizeof settings));
    FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_adaptive", rfd_adaptive_init(&settings, sizeof settings + 8));
    OK(rfd_adaptive_init(&settings, sizeof settings));
    CHECK(settings.averaging == 0.85 && settings.loss_bound == -INFINITY && settings.reserved == 0);
    rfd_group group;
    OK(rfd_group_init(&group, sizeof group));
    rfd_optimizer_options options;
    OK(rfd_optimizer_options_init(&options, sizeof options));
    options.groups = &group;
    options.group_count = 1;
    rfd_optimizer *first = NULL, *second = NULL;

#define CREATE_ADAPTIVE() rfd_adaptive_optimizer_create(&settings, &options, specs, 2, &first)
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_adaptive_optimizer_create(NULL, NULL, specs, 2, NULL));
    FAILS(RFD_ERROR_NULL, "specs", rfd_adaptive_optimizer_create(NULL, NULL, NULL, 2, &first));
    settings.size = 8;
    FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_adaptive", CREATE_ADAPTIVE());
    settings.size = sizeof settings;
    settings.averaging = 1;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "averaging", CREATE_ADAPTIVE());
    settings.averaging = NAN;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "averaging", CREATE_ADAPTIVE());
    settings.averaging = 0.9;
    settings.loss_bound = INFINITY;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "loss_bound", CREATE_ADAPTIVE());
    settings.loss_bound = NAN;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "loss_bound", CREATE_ADAPTIVE());
    settings.loss_bound = 0;
    settings.reserved = 1;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "anisotropy", CREATE_ADAPTIVE());
    settings.reserved = 0;
    CHECK(!first);

    /* With and without averages, beside the defaults: different steps. */
    float lengths[3];
    for (int k = 0; k < 3; k++) {
        settings.averaging = k == 1 ? 0 : 0.9;
        OK(k == 2 ? rfd_adaptive_optimizer_create(NULL, NULL, specs, 2, &first) : CREATE_ADAPTIVE());
        OK(rfd_adaptive_optimizer_create(k == 2 ? NULL : &settings, &options, specs, 2, &second));
        uint16_t a[] = {0x3f80, 0x3f80, 0, 0x4000}, a2[4]; /* 1, 1, 0, 2 */
        double b[] = {1, 1, 1, 1}, b2[4];
        float g[] = {0.1f, 0.2f, 0.3f, 0.4f};
        double h[] = {4, 3, 2, 1};
        rfd_tensor params[] = {tensor(a, 4, RFD_DTYPE_BF16), tensor(b, 4, RFD_DTYPE_F64)};
        rfd_tensor params2[] = {tensor(a2, 4, RFD_DTYPE_BF16), tensor(b2, 4, RFD_DTYPE_F64)};
        rfd_gradient grads[] = {gradient_at(g, 4, RFD_DTYPE_F32), gradient_at(h, 4, RFD_DTYPE_F64)};
        rfd_step_input scalars = input(2.0);
        rfd_step_report report = {.size = sizeof report}, report2 = {.size = sizeof report2};
        for (int step = 0; step < 40; step++) {
            scalars.loss = 2.0 - 0.01 * step * step * (step % 2);
            h[step % 4] = -h[step % 4];
            OK(rfd_optimizer_step(first, params, grads, 2, &scalars, NULL, &report));
            /* Without a bound no loss is too low. */
            const int skipped = k < 2 && scalars.loss < 0;
            CHECK(report.outcome == (skipped ? RFD_OUTCOME_LOSS_BELOW_BOUND : RFD_OUTCOME_APPLIED));
            CHECK(skipped ? report.trust == 0 && report.limit == RFD_LIMIT_NONE
                          : report.trust >= 0.001 && report.trust <= 4 && report.limit != RFD_LIMIT_NONE);
            if (step >= 20) {
                OK(rfd_optimizer_step(second, params2, grads, 2, &scalars, NULL, &report2));
                CHECK(!memcmp(&report, &report2, sizeof report));
                CHECK(!memcmp(a, a2, sizeof a) && !memcmp(b, b2, sizeof b));
            }
            if (step == 19) {
                OK(rfd_optimizer_save_state(first, in_folder("adaptive.safetensors"), NULL));
                OK(rfd_optimizer_load_state(second, in_folder("adaptive.safetensors"), NULL));
                memcpy(a2, a, sizeof a);
                memcpy(b2, b, sizeof b);
            }
        }
        CHECK(report.applied_steps > 20 && (k == 2 ? report.skipped_steps == 0 : report.skipped_steps > 5));
        lengths[k] = (float)b[0];

        /* Settings of the groups, and what only a fitted model has. */
        OK(rfd_optimizer_set_multiplier(first, 0.5, NULL));
        OK(rfd_optimizer_set_max_step_size(first, 1e-9, NULL));
        scalars.loss = 2.0;
        OK(rfd_optimizer_step(first, params, grads, 2, &scalars, NULL, &report));
        CHECK(report.outcome == RFD_OUTCOME_APPLIED && report.step_size == 1e-9);
        OK(rfd_optimizer_set_max_step_size(first, INFINITY, NULL));
        OK(rfd_optimizer_step(first, params, grads, 2, &scalars, NULL, &report));
        CHECK(report.step_size > 1e-9);
        FAILS(RFD_ERROR_INVALID_ARGUMENT, "max_step_size = 0", rfd_optimizer_set_max_step_size(first, 0, NULL));
        FAILS(RFD_ERROR_INVALID_ARGUMENT, "max_step_size", rfd_optimizer_set_max_step_size(first, NAN, NULL));
        FAILS(RFD_ERROR_INVALID_ARGUMENT, "stream", rfd_optimizer_set_max_step_size(first, 1, b));
        FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_set_max_step_size(NULL, 1, NULL));
        rfd_buffer *kernels = NULL;
        OK(rfd_optimizer_kernels(first, &kernels));
        CHECK(!strcmp((const char *)rfd_buffer_data(kernels), "CPU"));
        rfd_buffer_destroy(kernels);
        FAILS(RFD_ERROR_NULL, "text", rfd_optimizer_kernels(first, NULL));
        FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_kernels(NULL, &kernels));
        /* A step on the CPU is no launch. */
        OK(rfd_optimizer_set_one_launch(first, 0));
        FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_set_one_launch(NULL, 0));
        OK(rfd_optimizer_set_weight_decay(first, 0, 0.01, NULL));
        OK(rfd_optimizer_set_group(first, 0, &group, NULL));
        FAILS(RFD_ERROR_INVALID_ARGUMENT, "adaptive", rfd_optimizer_set_fitted(first, FITTED(NULL), NULL));
        rfd_optimizer_destroy(first);
        rfd_optimizer_destroy(second);
        first = NULL;
    }
    CHECK(lengths[0] != lengths[1] && lengths[0] != lengths[2] && lengths[1] != lengths[2]);

    /* States are of one method. */
    rfd_model *model = new_model();
    OK(rfd_fitted_optimizer_create(FITTED(model), NULL, specs, 2, &second));
    rfd_model_destroy(model);
    FAILS(RFD_ERROR_STATE, "adaptive", rfd_optimizer_load_state(second, in_folder("adaptive.safetensors"), NULL));
    OK(rfd_optimizer_save_state(second, in_folder("fitted.safetensors"), NULL));
    OK(CREATE_ADAPTIVE());
    FAILS(RFD_ERROR_STATE, "adaptive", rfd_optimizer_load_state(first, in_folder("fitted.safetensors"), NULL));
    rfd_optimizer_destroy(first);
    rfd_optimizer_destroy(second);

    options.device_kind = RFD_DEVICE_CUDA; /* here or not, no crash */
    first = NULL;
    CHECK(CREATE_ADAPTIVE() == RFD_OK || strlen(rfd_last_error()) > 5);
    rfd_optimizer_destroy(first);
}

/* Rows by the shape and as given, and structs of the first header, which knew of neither rows nor trust. */
static void rows_and_older_structs(void) {
    typedef struct {
        char bytes[offsetof(rfd_tensor_spec, row)];
    } old_spec;
    union {
        rfd_step_report now;
        char bytes[sizeof(rfd_step_report)];
    } report;
    const size_t old_report = offsetof(rfd_step_report, trust);
    const uint64_t square[] = {8, 8}, line[] = {64}, none[] = {8, 0};
    /* Alike but for rows: those of the first two are the same. */
    rfd_tensor_spec specs[] = {spec("square", square, 2, RFD_DTYPE_F32), spec("line", line, 1, RFD_DTYPE_F32),
                               spec("line", line, 1, RFD_DTYPE_F32), spec("empty", none, 2, RFD_DTYPE_F32)};
    specs[1].row = 8;
    float p[3][64], g[64];
    for (int k = 0; k < 3; k++) {
        for (int i = 0; i < 64; i++) {
            p[k][i] = (float)(i % 7) - 3;
            g[i] = (float)(i % 5 - 2) * (float)(i / 8 + 1);
        }
        rfd_optimizer *optimizer = NULL;
        old_spec old[2];
        specs[3].size = specs[k].size = k == 1 ? sizeof *specs : sizeof *old;
        if (k == 1) {
            const rfd_tensor_spec both[] = {specs[1], specs[3]};
            OK(rfd_adaptive_optimizer_create(NULL, NULL, both, 2, &optimizer));
        } else {
            memcpy(&old[0], &specs[k], sizeof *old);
            memcpy(&old[1], &specs[3], sizeof *old);
            OK(rfd_adaptive_optimizer_create(NULL, NULL, (const rfd_tensor_spec *)(const void *)old, 2, &optimizer));
        }
        const rfd_tensor params[] = {tensor(p[k], 64, RFD_DTYPE_F32), tensor(NULL, 0, RFD_DTYPE_F32)};
        const rfd_gradient grads[] = {gradient_at(g, 64, RFD_DTYPE_F32), gradient_at(NULL, 0, RFD_DTYPE_F32)};
        for (int step = 0; step < 10; step++) {
            const rfd_step_input scalars = input(3 - 0.1 * step);
            memset(&report, 0x55, sizeof report);
            report.now.size = step % 2 ? old_report : sizeof report;
            OK(rfd_optimizer_step(optimizer, params, grads, 2, &scalars, NULL, &report.now));
            CHECK(report.now.outcome == RFD_OUTCOME_APPLIED);
            CHECK(report.now.limit != RFD_LIMIT_NONE);
            /* Nothing is written behind an older struct. */
            CHECK(step % 2 ? report.bytes[old_report] == 0x55 : report.now.trust == 1);
        }
        rfd_optimizer_destroy(optimizer);
    }
    CHECK(!memcmp(p[0], p[1], sizeof *p) && memcmp(p[0], p[2], sizeof *p));
}

/* All parameters in one array, and gradients given one by one: the bits of the whole step, for both
 * methods and also where the library uses its threads. */
#define LONG 300000

static void flat_and_by_tensor(void) {
    const uint64_t rows[] = {300, 1000}, none[] = {0}, seven[] = {7};
    const rfd_tensor_spec specs[] = {spec("w", rows, 2, RFD_DTYPE_F32), spec("empty", none, 1, RFD_DTYPE_F32),
                                     spec("b", seven, 1, RFD_DTYPE_F32)};
    const size_t count = LONG + 7;
    float *p = malloc(count * sizeof *p), *p2 = malloc(count * sizeof *p), *p3 = malloc(count * sizeof *p);
    float *g = malloc(count * sizeof *g);
    CHECK(p && p2 && p3 && g);
    rfd_tensor params[] = {tensor(p, LONG, RFD_DTYPE_F32), tensor(NULL, 0, RFD_DTYPE_F32),
                           tensor(p + LONG, 7, RFD_DTYPE_F32)};
    rfd_tensor params3[] = {tensor(p3, LONG, RFD_DTYPE_F32), tensor(NULL, 0, RFD_DTYPE_F32),
                            tensor(p3 + LONG, 7, RFD_DTYPE_F32)};
    rfd_gradient grads[] = {gradient_at(g, LONG, RFD_DTYPE_F32), gradient_at(NULL, 0, RFD_DTYPE_F32),
                          gradient_at(g + LONG, 7, RFD_DTYPE_F32)};
    rfd_model *model = new_model();
    rfd_step_input scalars = input(2.0);
    rfd_step_report report = {.size = sizeof report}, report2 = {.size = sizeof report2}, report3 = {.size = sizeof report3};
    rfd_optimizer *whole = NULL, *flat = NULL, *by_tensor = NULL;
#define STEP_FLAT() rfd_optimizer_step_flat(flat, p2, g, count, RFD_DTYPE_F32, &scalars, NULL, &report2)
#define GIVE(k, from, many) rfd_optimizer_give_gradient(by_tensor, k, from, many, RFD_DTYPE_F32)
#define FINISH() rfd_optimizer_finish(by_tensor, params3, 3, &scalars, &report3)
    for (int method = 0; method < 2; method++) {
        rfd_optimizer **const made[] = {&whole, &flat, &by_tensor};
        for (int k = 0; k < 3; k++) {
            OK(method == 0 ? rfd_fitted_optimizer_create(FITTED(model), NULL, specs, 3, made[k])
                           : rfd_adaptive_optimizer_create(NULL, NULL, specs, 3, made[k]));
        }
        for (size_t i = 0; i < count; i++) {
            p[i] = p2[i] = p3[i] = (float)(i % 100) / 50 - 1;
        }
        p[3] = p2[3] = p3[3] = -0.0f;
        for (int step = 0; step < 4; step++) {
            for (size_t i = 0; i < count; i++) {
                g[i] = (float)((i * 37 + (size_t)step) % 101) / 101 - 0.5f;
            }
            g[3] = -0.0f;
            scalars.loss = 2.0 - 0.1 * step;
            OK(rfd_optimizer_step(whole, params, grads, 3, &scalars, NULL, &report));
            CHECK(report.outcome == RFD_OUTCOME_APPLIED);
            OK(STEP_FLAT());
            CHECK(!memcmp(&report, &report2, sizeof report) && !memcmp(p, p2, count * sizeof *p));
            OK(GIVE(2, g + LONG, 7)); /* in any order */
            OK(GIVE(1, NULL, 0));
            OK(GIVE(0, g, LONG));
            g[0] += 1; /* a copy was taken */
            OK(FINISH());
            CHECK(!memcmp(&report, &report3, sizeof report) && !memcmp(p, p3, count * sizeof *p));
        }
        if (method == 0) {
            rfd_optimizer_destroy(whole);
            rfd_optimizer_destroy(flat);
            rfd_optimizer_destroy(by_tensor);
        }
    }
    rfd_optimizer_destroy(flat);
    rfd_optimizer_destroy(whole);
    OK(rfd_fitted_optimizer_create(FITTED(model), NULL, specs, 3, &flat));
    OK(rfd_fitted_optimizer_create(FITTED(model), NULL, specs, 3, &whole));

    /* Accumulated: twice the gradient with a scale of 2 is the gradient. A tensor of which none was given has
     * none. */
    rfd_optimizer_destroy(by_tensor);
    OK(rfd_fitted_optimizer_create(FITTED(model), NULL, specs, 3, &by_tensor));
    memcpy(p, p3, count * sizeof *p);
    memcpy(p2, p3, count * sizeof *p);
    grads[2].data = NULL;
    OK(GIVE(0, g, LONG));
    OK(rfd_optimizer_step(whole, params, grads, 3, &scalars, NULL, &report));
    OK(GIVE(0, g, LONG));
    scalars.grad_scale = 2;
    OK(FINISH());
    CHECK(!memcmp(&report, &report3, sizeof report) && !memcmp(p, p3, count * sizeof *p));
    scalars.grad_scale = 1;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "number of gradients = 0", FINISH());

    /* A skipped step forgets what was given, an error does not. */
    OK(GIVE(0, g, LONG));
    scalars.found_inf = 1;
    OK(FINISH());
    CHECK(report3.outcome == RFD_OUTCOME_FOUND_INF && !memcmp(p, p3, count * sizeof *p));
    scalars.found_inf = 0;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "number of gradients = 0", FINISH());
    OK(GIVE(2, g + LONG, 7));
    scalars.grad_scale = -1;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "grad_scale", FINISH());
    scalars.grad_scale = 1;
    OK(rfd_optimizer_finish(by_tensor, params3, 3, &scalars, NULL));
    CHECK(p3[LONG] != p[LONG] && !memcmp(p, p3, LONG * sizeof *p));

    /* What is wrong is named. */
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_give_gradient(NULL, 0, g, LONG, RFD_DTYPE_F32));
    FAILS(RFD_ERROR_NULL, "grad", GIVE(0, NULL, LONG));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "index = 3: the optimizer was made for 3 tensors", GIVE(3, g, LONG));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "index", GIVE(SIZE_MAX, g, LONG));
    FAILS(RFD_ERROR_TENSOR, "`b`: was described with 7 elements but its gradient has 8", GIVE(2, g, 8));
    FAILS(RFD_ERROR_TENSOR, "`b`", GIVE(2, g, UINT64_MAX));
    FAILS(RFD_ERROR_TENSOR, "`b`: its gradient at", GIVE(2, (char *)g + 1, 7));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "dtype", rfd_optimizer_give_gradient(by_tensor, 2, g, 7, 4));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "number of gradients = 0", FINISH());
    OK(GIVE(0, g, LONG));
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_finish(NULL, params3, 3, &scalars, &report3));
    FAILS(RFD_ERROR_NULL, "params", rfd_optimizer_finish(by_tensor, NULL, 3, &scalars, &report3));
    FAILS(RFD_ERROR_NULL, "rfd_step_input", rfd_optimizer_finish(by_tensor, params3, 3, NULL, &report3));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "number of params = 2", rfd_optimizer_finish(by_tensor, params3, 2, &scalars, &report3));
    params3[2].data = p3;
    FAILS(RFD_ERROR_TENSOR, "shares memory", FINISH());
    params3[2].data = p3 + LONG;
    params3[0].device_kind = RFD_DEVICE_CUDA;
    FAILS(RFD_ERROR_TENSOR, "`w`: its parameter is on device kind 1", FINISH());
    params3[0].device_kind = RFD_DEVICE_CPU;
    scalars.loss_address = &scalars;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "loss = address", FINISH());
    scalars.loss_address = NULL;
    report3.size = 4;
    FAILS(RFD_ERROR_STRUCT_SIZE, "rfd_step_report", FINISH());
    report3.size = sizeof report3;
    OK(FINISH());

    memcpy(p, p2, count * sizeof *p);
#define FLAT(a, b, many, type, stream) rfd_optimizer_step_flat(flat, a, b, many, type, &scalars, stream, &report2)
    FAILS(RFD_ERROR_NULL, "optimizer", rfd_optimizer_step_flat(NULL, p2, g, count, RFD_DTYPE_F32, &scalars, NULL, NULL));
    FAILS(RFD_ERROR_NULL, "params", FLAT(NULL, g, count, RFD_DTYPE_F32, NULL));
    FAILS(RFD_ERROR_NULL, "grads", FLAT(p2, NULL, count, RFD_DTYPE_F32, NULL));
    FAILS(RFD_ERROR_NULL, "rfd_step_input", rfd_optimizer_step_flat(flat, p2, g, count, RFD_DTYPE_F32, NULL, NULL, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "count = 300006: the optimizer's 3 tensors have 300007 elements together",
          FLAT(p2, g, count - 1, RFD_DTYPE_F32, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "count", FLAT(p2, g, UINT64_MAX, RFD_DTYPE_F32, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "count", FLAT(NULL, NULL, 0, RFD_DTYPE_F32, NULL));
    FAILS(RFD_ERROR_TENSOR, "`w`: was described as f32 but the arrays are bf16", FLAT(p2, g, count, RFD_DTYPE_BF16, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "dtype", FLAT(p2, g, count, 4, NULL));
    FAILS(RFD_ERROR_TENSOR, "aligned", FLAT((char *)p2 + 2, g, count, RFD_DTYPE_F32, NULL));
    FAILS(RFD_ERROR_TENSOR, "shares memory", FLAT(p2, p2 + 10, count, RFD_DTYPE_F32, NULL));
    FAILS(RFD_ERROR_TENSOR, "beyond", FLAT((void *)(UINTPTR_MAX - 15), g, count, RFD_DTYPE_F32, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "stream", FLAT(p2, g, count, RFD_DTYPE_F32, g));
    CHECK(!memcmp(p, p2, count * sizeof *p));
    rfd_optimizer_destroy(whole);
    rfd_optimizer_destroy(flat);
    rfd_optimizer_destroy(by_tensor);

    /* Formats in any mixture: a sum is in float until a gradient is double. */
    const rfd_tensor_spec mixed[] = {spec("h", seven, 1, RFD_DTYPE_BF16), spec("d", seven, 1, RFD_DTYPE_F64)};
    OK(rfd_adaptive_optimizer_create(NULL, NULL, mixed, 2, &whole));
    OK(rfd_adaptive_optimizer_create(NULL, NULL, mixed, 2, &by_tensor));
    uint16_t h[7] = {0x3f80, 0x4000}, h2[7] = {0x3f80, 0x4000}; /* 1, 2 */
    const uint16_t halves[7] = {0x3f80, 0xbf80, 0x4000};        /* 1, -1, 2 */
    double d[7] = {3}, d2[7] = {3}, doubles[7] = {1e-12, 2}, sum[7] = {2 + 1e-12, 0, 4};
    rfd_tensor list[] = {tensor(h, 7, RFD_DTYPE_BF16), tensor(d, 7, RFD_DTYPE_F64)};
    rfd_tensor list2[] = {tensor(h2, 7, RFD_DTYPE_BF16), tensor(d2, 7, RFD_DTYPE_F64)};
    rfd_gradient sums[] = {gradient_at(halves, 7, RFD_DTYPE_BF16), gradient_at(sum, 7, RFD_DTYPE_F64)};
    for (int step = 0; step < 3; step++) {
        OK(rfd_optimizer_step(whole, list, sums, 2, &scalars, NULL, &report));
        OK(rfd_optimizer_give_gradient(by_tensor, 0, halves, 7, RFD_DTYPE_BF16));
        OK(rfd_optimizer_give_gradient(by_tensor, 1, halves, 7, RFD_DTYPE_BF16));
        OK(rfd_optimizer_give_gradient(by_tensor, 1, doubles, 7, RFD_DTYPE_F64));
        OK(rfd_optimizer_give_gradient(by_tensor, 1, (const float[7]){1, -1, 2}, 7, RFD_DTYPE_F32));
        OK(rfd_optimizer_finish(by_tensor, list2, 2, &scalars, &report3));
        CHECK(!memcmp(&report, &report3, sizeof report) && !memcmp(h, h2, sizeof h) && !memcmp(d, d2, sizeof d));
    }
    rfd_optimizer_destroy(whole);
    rfd_optimizer_destroy(by_tensor);

    /* No tensors at all. */
    OK(rfd_fitted_optimizer_create(FITTED(model), NULL, NULL, 0, &flat));
    OK(rfd_optimizer_step_flat(flat, NULL, NULL, 0, RFD_DTYPE_F32, &scalars, NULL, &report2));
    CHECK(report2.outcome == RFD_OUTCOME_ZERO_GRADIENT);
    OK(rfd_optimizer_finish(flat, NULL, 0, &scalars, &report2));
    CHECK(report2.outcome == RFD_OUTCOME_ZERO_GRADIENT);
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "index", rfd_optimizer_give_gradient(flat, 0, NULL, 0, RFD_DTYPE_F32));
    rfd_optimizer_destroy(flat);
    rfd_model_destroy(model);
    free(p);
    free(p2);
    free(p3);
    free(g);
}

static void number_of_threads(void) {
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "at most 1024", rfd_set_threads(1025));
    OK(rfd_set_threads(3));
    OK(rfd_set_threads(0));
    OK(rfd_set_threads(2));
}

/* Threads: each its own optimizer, and several with one. */
typedef struct {
    rfd_optimizer *optimizer;
    float values[1000], gradient[1000];
    unsigned done, busy, wrong;
} worker_t;

static void *work(void *data) {
    worker_t *worker = data;
    rfd_tensor param = tensor(worker->values, 1000, RFD_DTYPE_F32);
    rfd_gradient grad = gradient_at(worker->gradient, 1000, RFD_DTYPE_F32);
    rfd_step_input scalars;
    worker->wrong += rfd_step_input_init(&scalars, sizeof scalars) != RFD_OK;
    scalars.loss = 2.0;
    for (int i = 0; i < 200; i++) {
        rfd_status status = rfd_optimizer_step(worker->optimizer, &param, &grad, 1, &scalars, NULL, NULL);
        worker->done += status == RFD_OK;
        worker->busy += status == RFD_ERROR_BUSY;
        rfd_step_report report = {.size = sizeof report};
        worker->wrong += rfd_optimizer_report(worker->optimizer, &report) != RFD_OK;
    }
    /* The error of one thread is not the other's. */
    char text[100];
    scalars.grad_scale = -1.0 - worker->gradient[0];
    rfd_status status = rfd_optimizer_step(worker->optimizer, &param, &grad, 1, &scalars, NULL, NULL);
    snprintf(text, sizeof text, "grad_scale = %g", scalars.grad_scale);
    worker->wrong += status != RFD_ERROR_BUSY && !strstr(rfd_last_error(), text);
    return NULL;
}

static void threads(void) {
    const uint64_t shape[] = {1000};
    const rfd_tensor_spec specs = spec("w", shape, 1, RFD_DTYPE_F32);
    rfd_model *model = new_model();
    for (int shared = 0; shared < 2; shared++) {
        worker_t *workers = calloc(4, sizeof *workers);
        CHECK(workers);
        rfd_optimizer *common = NULL;
        OK(rfd_fitted_optimizer_create(FITTED(model), NULL, &specs, 1, &common));
        pthread_t ids[4];
        for (int k = 0; k < 4; k++) {
            for (int i = 0; i < 1000; i++) {
                workers[k].values[i] = 1;
                workers[k].gradient[i] = (float)(i + k);
            }
            workers[k].optimizer = common;
            if (!shared) {
                OK(rfd_fitted_optimizer_create(FITTED(model), NULL, &specs, 1, &workers[k].optimizer));
            }
        }
        for (int k = 0; k < 4; k++) {
            CHECK(pthread_create(&ids[k], NULL, work, &workers[k]) == 0);
        }
        unsigned done = 0;
        for (int k = 0; k < 4; k++) {
            CHECK(pthread_join(ids[k], NULL) == 0);
            CHECK(workers[k].wrong == 0 && workers[k].done + workers[k].busy == 200 && (shared || workers[k].busy == 0));
            done += workers[k].done;
        }
        rfd_step_report report = {.size = sizeof report};
        for (int k = 0; k < 4 && !shared; k++) {
            OK(rfd_optimizer_report(workers[k].optimizer, &report));
            CHECK(report.applied_steps == 200);
            rfd_optimizer_destroy(workers[k].optimizer);
        }
        if (shared) {
            OK(rfd_optimizer_report(common, &report));
            CHECK(report.applied_steps == done);
        }
        rfd_optimizer_destroy(common);
        free(workers);
    }
    rfd_model_destroy(model);
}

int main(int argc, char **argv) {
    if (argc != 2 || strlen(argv[1]) >= sizeof folder) {
        fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    strcpy(folder, argv[1]);
    make_samples();
    versions();
    number_of_threads();
    models();
    estimation();
    auto_fit();
    creation();
    steps();
    settings_and_states();
    adaptive();
    rows_and_older_structs();
    flat_and_by_tensor();
    threads();
    printf("%d checks passed\n", checks);
    return 0;
}
