/* Steps on a CUDA device through the C interface: the bits of the CPU's, eager, split and captured in a
 * graph. Uses the driver alone, opened at run time; skipped without a device, unless RFDESCENT_REQUIRE_GPU=1
 * makes that a failure. */
#include "check.h"

#include <dlfcn.h>
#include <math.h>

typedef int result_t;
typedef uint64_t address_t;

/* The part of cuda.h that is used here. */
static result_t (*cuInit)(unsigned);
static result_t (*cuDeviceGet)(int *, int);
static result_t (*cuDevicePrimaryCtxRetain)(void **, int);
static result_t (*cuCtxSetCurrent)(void *);
static result_t (*cuStreamCreate)(void **, unsigned);
static result_t (*cuStreamSynchronize)(void *);
static result_t (*cuStreamBeginCapture)(void *, int);
static result_t (*cuStreamEndCapture)(void *, void **);
static result_t (*cuGraphInstantiate)(void **, void *, unsigned long long);
static result_t (*cuGraphLaunch)(void *, void *);
static result_t (*cuMemAlloc)(address_t *, size_t);
static result_t (*cuMemFree)(address_t);
static result_t (*cuMemcpyHtoDAsync)(address_t, const void *, size_t, void *);
static result_t (*cuMemcpyDtoHAsync)(void *, address_t, size_t, void *);

static int open_driver(void) {
    const struct {
        const char *name;
        void *function;
    } functions[] = {
        {"cuInit", &cuInit},
        {"cuDeviceGet", &cuDeviceGet},
        {"cuDevicePrimaryCtxRetain", &cuDevicePrimaryCtxRetain},
        {"cuCtxSetCurrent", &cuCtxSetCurrent},
        {"cuStreamCreate", &cuStreamCreate},
        {"cuStreamSynchronize", &cuStreamSynchronize},
        {"cuStreamBeginCapture_v2", &cuStreamBeginCapture},
        {"cuStreamEndCapture", &cuStreamEndCapture},
        {"cuGraphInstantiateWithFlags", &cuGraphInstantiate},
        {"cuGraphLaunch", &cuGraphLaunch},
        {"cuMemAlloc_v2", &cuMemAlloc},
        {"cuMemFree_v2", &cuMemFree},
        {"cuMemcpyHtoDAsync_v2", &cuMemcpyHtoDAsync},
        {"cuMemcpyDtoHAsync_v2", &cuMemcpyDtoHAsync},
    };
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    for (size_t i = 0; driver && i < sizeof functions / sizeof *functions; i++) {
        void *symbol = dlsym(driver, functions[i].name);
        CHECK(symbol);
        memcpy(functions[i].function, &symbol, sizeof symbol);
    }
    int device;
    return driver && cuInit(0) == 0 && cuDeviceGet(&device, 0) == 0;
}

#define CU(call) CHECK((call) == 0)
#define TENSORS 3

static void *stream;

static void upload(address_t to, const void *from, size_t size) {
    CU(cuMemcpyHtoDAsync(to, from, size, stream));
    CU(cuStreamSynchronize(stream));
}

/* Parameters and gradients on the host and, with the same values, on the device. */
static const uint64_t counts[TENSORS] = {5000, 0, 777};
static const uint32_t dtypes[TENSORS] = {RFD_DTYPE_F32, RFD_DTYPE_F32, RFD_DTYPE_BF16};
static const size_t bytes[TENSORS] = {4 * 5000, 0, 2 * 777};
static union {
    double align;
    unsigned char bytes[4 * 5000];
} values[TENSORS], gradients[TENSORS], copies[TENSORS];
static address_t device_values[TENSORS], device_gradients[TENSORS];

static rfd_tensor tensor(void *data, int k, int on_device) {
    return (rfd_tensor){.size = sizeof(rfd_tensor),
                        .data = data,
                        .count = counts[k],
                        .dtype = dtypes[k],
                        .device_kind = on_device ? RFD_DEVICE_CUDA : RFD_DEVICE_CPU};
}

static rfd_gradient gradient(const void *data, int k, int on_device) {
    return (rfd_gradient){.size = sizeof(rfd_gradient),
                          .data = data,
                          .count = counts[k],
                          .dtype = dtypes[k],
                          .device_kind = on_device ? RFD_DEVICE_CUDA : RFD_DEVICE_CPU};
}

static void fill(unsigned char *data, int k, uint64_t seed) {
    for (size_t i = 0; i < counts[k]; i++) {
        float value = (float)sin((double)(seed + i * (k + 1)));
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        uint16_t half = (uint16_t)(bits >> 16);
        if (dtypes[k] == RFD_DTYPE_F32) {
            memcpy(data + 4 * i, &value, 4);
        } else {
            memcpy(data + 2 * i, &half, 2);
        }
    }
}

static void same_values(void) {
    for (int k = 0; k < TENSORS; k++) {
        if (bytes[k] > 0) {
            CU(cuMemcpyDtoHAsync(copies[k].bytes, device_values[k], bytes[k], stream));
        }
    }
    CU(cuStreamSynchronize(stream));
    for (int k = 0; k < TENSORS; k++) {
        CHECK(!memcmp(copies[k].bytes, values[k].bytes, bytes[k]));
    }
}

int main(void) {
    const char *required = getenv("RFDESCENT_REQUIRE_GPU");
    if (!open_driver()) {
        CHECK(!required || strcmp(required, "1"));
        printf("skipped: no CUDA driver and device\n");
        return 0;
    }
    int device;
    void *context;
    CU(cuDeviceGet(&device, 0));
    CU(cuDevicePrimaryCtxRetain(&context, device));
    CU(cuCtxSetCurrent(context));
    CU(cuStreamCreate(&stream, 1));

    const rfd_moments moments = {sizeof moments, 2.5, 0.01, 0.9, 5.0, 300.0, 5777};
    rfd_model *model = NULL;
    OK(rfd_model_create("squared_exponential", &moments, &model));
    rfd_fitted fitted = {.size = sizeof fitted, .model = model, .momentum = 0.9};
    rfd_optimizer_options options;
    OK(rfd_optimizer_options_init(&options, sizeof options));
    options.flags = RFD_OPTIMIZER_MASTER_WEIGHTS;
    rfd_tensor_spec specs[TENSORS];
    static const char *const names[TENSORS] = {"a", "empty", "b"};
    rfd_tensor params[TENSORS], device_params[TENSORS];
    rfd_gradient grads[TENSORS], device_grads[TENSORS];
    address_t scalars; /* loss, gradient scale, found_inf */
    CU(cuMemAlloc(&scalars, 16));
    for (int k = 0; k < TENSORS; k++) {
        specs[k] = (rfd_tensor_spec){
            .size = sizeof *specs, .name = names[k], .shape = &counts[k], .rank = 1, .dtype = dtypes[k]};
        fill(values[k].bytes, k, 1);
        fill(gradients[k].bytes, k, 100);
        params[k] = tensor(values[k].bytes, k, 0);
        grads[k] = gradient(gradients[k].bytes, k, 0);
        if (bytes[k] > 0) {
            CU(cuMemAlloc(&device_values[k], bytes[k]));
            CU(cuMemAlloc(&device_gradients[k], bytes[k]));
            upload(device_values[k], values[k].bytes, bytes[k]);
            upload(device_gradients[k], gradients[k].bytes, bytes[k]);
        }
        device_params[k] = tensor((void *)(uintptr_t)device_values[k], k, 1);
        device_grads[k] = gradient((void *)(uintptr_t)device_gradients[k], k, 1);
    }
    rfd_optimizer *cpu = NULL, *gpu = NULL;
    OK(rfd_fitted_optimizer_create(&fitted, &options, specs, TENSORS, &cpu));
    options.device_kind = RFD_DEVICE_CUDA;
    options.device_index = 99;
    FAILS(RFD_ERROR_DEVICE, "99", rfd_fitted_optimizer_create(&fitted, &options, specs, TENSORS, &gpu));
    options.device_index = 0;
    OK(rfd_fitted_optimizer_create(&fitted, &options, specs, TENSORS, &gpu));
    rfd_step_report report = {.size = sizeof report}, status = {.size = sizeof status};
    OK(rfd_optimizer_report(gpu, &status));
    CHECK(status.outcome == RFD_OUTCOME_NONE);

    /* What is wrong is refused before anything is queued. */
    rfd_step_input input, device_input;
    OK(rfd_step_input_init(&input, sizeof input));
    input.loss = 2.0;
    device_input = input;
#define STEP() rfd_optimizer_step(gpu, device_params, device_grads, TENSORS, &device_input, stream, NULL)
    FAILS(RFD_ERROR_TENSOR, "`a`", rfd_optimizer_step(gpu, params, device_grads, TENSORS, &input, stream, NULL));
    FAILS(RFD_ERROR_TENSOR, "its gradient", rfd_optimizer_step(gpu, device_params, grads, TENSORS, &input, stream, NULL));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "report",
          rfd_optimizer_step(gpu, device_params, device_grads, TENSORS, &input, stream, &report));
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "number of params",
          rfd_optimizer_step(gpu, device_params, device_grads, 2, &input, stream, NULL));
    device_params[0].count--;
    FAILS(RFD_ERROR_TENSOR, "`a`", STEP());
    device_params[0].count++;
    device_params[2].dtype = RFD_DTYPE_F16;
    FAILS(RFD_ERROR_TENSOR, "`b`", STEP());
    device_params[2].dtype = RFD_DTYPE_BF16;
    device_params[0].data = (char *)device_params[0].data + 1;
    FAILS(RFD_ERROR_TENSOR, "`a`", STEP());
    device_params[0].data = device_params[2].data;
    FAILS(RFD_ERROR_TENSOR, "`", STEP());
    device_params[0].data = NULL;
    FAILS(RFD_ERROR_TENSOR, "`a`", STEP());
    device_params[0].data = (void *)(uintptr_t)device_values[0];
#define CHECK_STEP() rfd_optimizer_check_step(gpu, device_params, device_grads, TENSORS, &device_input, stream)
    OK(CHECK_STEP());
    device_input.grad_scale = 2;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "grad_scale = 2", STEP());
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "grad_scale = 2", CHECK_STEP());
    device_input.grad_scale = 1;
    device_input.found_inf = 1;
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "found_inf = 1", STEP());
    device_input.found_inf = 0;

    /* Eager. */
    OK(STEP());
    OK(rfd_optimizer_wait_report(gpu, stream, &status));
    OK(rfd_optimizer_step(cpu, params, grads, TENSORS, &input, NULL, &report));
    CHECK(!memcmp(&report, &status, sizeof report));
    same_values();

    /* A cap, in the order of the stream's work. */
    OK(rfd_optimizer_set_max_step_size(gpu, 1e-3, stream));
    OK(rfd_optimizer_set_max_step_size(cpu, 1e-3, NULL));
    OK(STEP());
    OK(rfd_optimizer_wait_report(gpu, stream, &status));
    OK(rfd_optimizer_step(cpu, params, grads, TENSORS, &input, NULL, &report));
    CHECK(report.step_size == 1e-3 && !memcmp(&report, &status, sizeof report));
    same_values();
    OK(rfd_optimizer_set_max_step_size(gpu, INFINITY, stream));
    OK(rfd_optimizer_set_max_step_size(cpu, INFINITY, NULL));

    /* Several launches, whose blocks wait for none, have the same bits. */
    for (uint32_t one_launch = 0; one_launch < 2; one_launch++) {
        OK(rfd_optimizer_set_one_launch(gpu, one_launch));
        OK(STEP());
        OK(rfd_optimizer_wait_report(gpu, stream, &status));
        OK(rfd_optimizer_step(cpu, params, grads, TENSORS, &input, NULL, &report));
        CHECK(!memcmp(&report, &status, sizeof report));
        same_values();
    }

    /* The list has tensors of several formats. */
    rfd_buffer *kernels = NULL;
    OK(rfd_optimizer_kernels(gpu, &kernels));
    CHECK(strstr((const char *)rfd_buffer_data(kernels), "generic") && strstr((const char *)rfd_buffer_data(kernels), "differ"));
    rfd_buffer_destroy(kernels);

    /* Gradients are not taken one by one. */
    FAILS(RFD_ERROR_DEVICE, "works on a device", rfd_optimizer_give_gradient(gpu, 0, gradients[0].bytes, counts[0], dtypes[0]));
    FAILS(RFD_ERROR_DEVICE, "works on a device", rfd_optimizer_finish(gpu, device_params, TENSORS, &input, NULL));

    /* All tensors of one format in one array. */
    rfd_tensor_spec flat_specs[2] = {specs[0], specs[0]};
    const uint64_t parts[2] = {4000, 1000};
    for (int k = 0; k < 2; k++) {
        flat_specs[k].shape = &parts[k];
        flat_specs[k].name = k == 0 ? "first" : "second";
    }
    rfd_optimizer *flat_cpu = NULL, *flat_gpu = NULL;
    OK(rfd_adaptive_optimizer_create(NULL, &options, flat_specs, 2, &flat_gpu));
    options.device_kind = RFD_DEVICE_CPU;
    OK(rfd_adaptive_optimizer_create(NULL, &options, flat_specs, 2, &flat_cpu));
    void *array = device_params[0].data;
    const void *array_of_gradients = device_grads[0].data;
    for (int i = 0; i < 3; i++) {
        input.loss = device_input.loss = 2.0 - 0.1 * i;
        OK(rfd_optimizer_step_flat(flat_cpu, values[0].bytes, gradients[0].bytes, 5000, RFD_DTYPE_F32, &input, NULL, &report));
        OK(rfd_optimizer_step_flat(flat_gpu, array, array_of_gradients, 5000, RFD_DTYPE_F32, &device_input, stream, NULL));
        OK(rfd_optimizer_wait_report(flat_gpu, stream, &status));
        CHECK(report.outcome == RFD_OUTCOME_APPLIED && !memcmp(&report, &status, sizeof report));
        same_values();
    }
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "report",
          rfd_optimizer_step_flat(flat_gpu, array, array_of_gradients, 5000, RFD_DTYPE_F32, &device_input, stream, &report));
    rfd_optimizer_destroy(flat_cpu);
    rfd_optimizer_destroy(flat_gpu);
    input.loss = device_input.loss = 2.0;

    /* The split form. */
    double *sums = NULL, *device_sums = NULL;
    OK(rfd_optimizer_local_sums(cpu, params, grads, TENSORS, &input, NULL, &sums));
    OK(rfd_optimizer_local_sums(gpu, device_params, device_grads, TENSORS, &device_input, stream, &device_sums));
    OK(rfd_optimizer_step_with_sums(gpu, device_params, device_grads, TENSORS, device_sums, &device_input, stream, NULL));
    OK(rfd_optimizer_step_with_sums(cpu, params, grads, TENSORS, sums, &input, NULL, &report));
    OK(rfd_optimizer_wait_report(gpu, stream, &status));
    CHECK(!memcmp(&report, &status, sizeof report));
    same_values();

    /* The same of the adaptive method, of a rank that has all of each tensor. */
    rfd_tensor_spec part_specs[TENSORS];
    const uint64_t zero = 0;
    for (int k = 0; k < TENSORS; k++) {
        part_specs[k] = specs[k];
        part_specs[k].whole = &counts[k];
        part_specs[k].start = &zero;
    }
    rfd_optimizer *part_cpu = NULL, *part_gpu = NULL;
    OK(rfd_adaptive_optimizer_create(NULL, &options, part_specs, TENSORS, &part_cpu));
    options.device_kind = RFD_DEVICE_CUDA;
    OK(rfd_adaptive_optimizer_create(NULL, &options, part_specs, TENSORS, &part_gpu));
    FAILS(RFD_ERROR_TENSOR, "two halves",
          rfd_optimizer_step(part_gpu, device_params, device_grads, TENSORS, &device_input, stream, NULL));
    double own[64];
    size_t len = 0, device_len = 0;
    OK(rfd_optimizer_sums_len(part_cpu, &len));
    OK(rfd_optimizer_sums_len(part_gpu, &device_len));
    CHECK(len == device_len && len <= 64);
    for (int i = 0; i < 3; i++) {
        OK(rfd_optimizer_local_sums(part_cpu, params, grads, TENSORS, &input, NULL, &sums));
        OK(rfd_optimizer_local_sums(part_gpu, device_params, device_grads, TENSORS, &device_input, stream, &device_sums));
        CU(cuMemcpyDtoHAsync(own, (address_t)(uintptr_t)device_sums, len * sizeof *own, stream));
        CU(cuStreamSynchronize(stream));
        CHECK(!memcmp(own, sums, len * sizeof *own));
        OK(rfd_optimizer_step_with_sums(part_gpu, device_params, device_grads, TENSORS, device_sums, &device_input, stream, NULL));
        OK(rfd_optimizer_step_with_sums(part_cpu, params, grads, TENSORS, sums, &input, NULL, &report));
        OK(rfd_optimizer_wait_report(part_gpu, stream, &status));
        CHECK(report.outcome == RFD_OUTCOME_APPLIED && !memcmp(&report, &status, sizeof report));
        same_values();
    }
    FAILS(RFD_ERROR_INVALID_ARGUMENT, "no first half",
          rfd_optimizer_step_with_sums(part_gpu, device_params, device_grads, TENSORS, device_sums, &device_input, stream, NULL));
    /* Sums of which not all ranks' were added. */
    OK(rfd_optimizer_local_sums(part_gpu, device_params, device_grads, TENSORS, &device_input, stream, &device_sums));
    own[0] -= 1;
    upload((address_t)(uintptr_t)device_sums, own, len * sizeof *own);
    OK(rfd_optimizer_step_with_sums(part_gpu, device_params, device_grads, TENSORS, device_sums, &device_input, stream, NULL));
    FAILS(RFD_ERROR_TENSOR, "`a`", rfd_optimizer_wait_report(part_gpu, stream, &status));
    same_values();
    rfd_optimizer_destroy(part_cpu);
    rfd_optimizer_destroy(part_gpu);

    /* Captured: loss, gradient scale and found_inf on the device, settings that change between replays. */
    float numbers[3] = {1.5f, 4.0f, 0.0f};
    device_input.loss_address = (void *)(uintptr_t)scalars;
    device_input.grad_scale_address = (float *)(uintptr_t)(scalars + 4);
    device_input.found_inf_address = (float *)(uintptr_t)(scalars + 8);
    OK(rfd_optimizer_init_master_weights(gpu, device_params, TENSORS, stream));
    /* That took the rounded parameters for the master weights; the state brings them back. */
    rfd_buffer *state = NULL;
    OK(rfd_optimizer_get_state(cpu, NULL, &state));
    OK(rfd_optimizer_set_state(gpu, rfd_buffer_data(state), rfd_buffer_size(state), stream));
    rfd_buffer_destroy(state);
    void *graph, *executable;
    CU(cuStreamBeginCapture(stream, 0));
    OK(STEP());
    CU(cuStreamEndCapture(stream, &graph));
    CU(cuGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < 5; i++) {
        numbers[0] = 2.0f - 0.25f * (float)i;
        numbers[2] = i == 2 ? 2.0f : 0.0f;
        upload(scalars, numbers, sizeof numbers);
        input.loss = numbers[0];
        input.grad_scale = numbers[1];
        input.found_inf = numbers[2];
        OK(rfd_optimizer_set_multiplier(cpu, 1.0 / (i + 1), NULL));
        OK(rfd_optimizer_set_multiplier(gpu, 1.0 / (i + 1), stream));
        fitted.inv_batch_size = 0.01 * i;
        fitted.momentum = 0.1 * (i + 1);
        OK(rfd_optimizer_set_fitted(cpu, &fitted, NULL));
        OK(rfd_optimizer_set_fitted(gpu, &fitted, stream));
        OK(rfd_optimizer_set_weight_decay(cpu, 0, 0.01 * i, NULL));
        OK(rfd_optimizer_set_weight_decay(gpu, 0, 0.01 * i, stream));
        CU(cuGraphLaunch(executable, stream));
        OK(rfd_optimizer_step(cpu, params, grads, TENSORS, &input, NULL, &report));
        OK(rfd_optimizer_wait_report(gpu, stream, &status));
        CHECK(!memcmp(&report, &status, sizeof report));
        CHECK(report.outcome == (i == 2 ? RFD_OUTCOME_FOUND_INF : RFD_OUTCOME_APPLIED));
        same_values();
    }
    /* The state goes from the device to the CPU. */
    OK(rfd_optimizer_get_state(gpu, stream, &state));
    OK(rfd_optimizer_set_state(cpu, rfd_buffer_data(state), rfd_buffer_size(state), NULL));
    rfd_buffer_destroy(state);
    OK(rfd_optimizer_step(cpu, params, grads, TENSORS, &input, NULL, &report));
    CU(cuGraphLaunch(executable, stream));
    CU(cuStreamSynchronize(stream));
    same_values();

    rfd_optimizer_destroy(cpu);
    rfd_optimizer_destroy(gpu);
    rfd_model_destroy(model);
    for (int k = 0; k < TENSORS; k++) {
        if (bytes[k] > 0) {
            CU(cuMemFree(device_values[k]));
            CU(cuMemFree(device_gradients[k]));
        }
    }
    CU(cuMemFree(scalars));
    printf("%d checks passed on a device\n", checks);
    return 0;
}
