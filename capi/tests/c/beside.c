/* The static library in one program with another one from Rust, which has much of the same inside. */
#include "check.h"

double beside_sum(const double *values, size_t count);

int main(void) {
    const double values[] = {1, 2, 4};
    CHECK(beside_sum(values, 3) == 7);

    const rfd_moments moments = {sizeof moments, 2.5, 0.01, 0.9, 5.0, 300.0, 20000};
    rfd_model *model = NULL;
    OK(rfd_model_create("squared_exponential", &moments, &model));
    double step = 0, loss = 2.0;
    OK(rfd_model_step(model, loss, 3.0, 0, RFD_MODE_RFD, 0, &step, NULL));
    CHECK(step > 0);
    rfd_model_destroy(model);

    static float parameters[100000], gradient[100000];
    for (int i = 0; i < 100000; i++) {
        gradient[i] = 1;
    }
    const uint64_t shape = 100000;
    const rfd_tensor_spec spec = {.size = sizeof spec, .name = "w", .shape = &shape, .rank = 1};
    const rfd_tensor param = {.size = sizeof param, .data = parameters, .count = shape};
    const rfd_gradient grad = {.size = sizeof grad, .data = gradient, .count = shape};
    rfd_optimizer *optimizer = NULL;
    OK(rfd_adaptive_optimizer_create(NULL, NULL, &spec, 1, &optimizer));
    rfd_step_input input;
    OK(rfd_step_input_init(&input, sizeof input));
    input.loss = loss;
    OK(rfd_optimizer_step(optimizer, &param, &grad, 1, &input, NULL, NULL));
    CHECK(parameters[0] < 0 && parameters[99999] == parameters[0]);
    rfd_optimizer_destroy(optimizer);
    printf("%d checks passed\n", checks);
    return 0;
}
