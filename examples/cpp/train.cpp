// The trainer of examples/c with the C++ wrapper; the network and the data are the same files.
//
//     train [--trace]
#include <rfdescent.hpp>

#include <cstdio>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "../c/data.h"
#include "../c/network.h"
#include "../c/random.h"

namespace {

constexpr std::size_t batch_size = 128;
constexpr int epochs = 3;

struct owned_data : data_t {
    owned_data(std::size_t examples, std::size_t pixels, std::uint64_t seed) {
        if (data_make(this, examples, pixels, seed) != 0) {
            throw std::bad_alloc();
        }
    }
    ~owned_data() { data_free(this); }
    owned_data(const owned_data &) = delete;
    owned_data &operator=(const owned_data &) = delete;
};

struct owned_network : network_t {
    explicit owned_network(const std::size_t (&units)[NETWORK_LAYERS + 1]) {
        if (network_create(this, units) != 0) {
            throw std::bad_alloc();
        }
    }
    ~owned_network() { network_destroy(this); }
    owned_network(const owned_network &) = delete;
    owned_network &operator=(const owned_network &) = delete;
};

double gradient(network_t &network, const data_t &data, const std::size_t *examples, std::size_t count) {
    const double loss = network_gradient(&network, &data, examples, count);
    if (loss < 0.0) {
        throw std::bad_alloc();
    }
    return loss;
}

void train(bool trace) {
    const owned_data training(6000, 64, 1), validation(1000, 64, 2);
    owned_network network({training.features, 128, training.classes});
    std::vector<std::size_t> examples(training.count);
    std::iota(examples.begin(), examples.end(), 0);

    // Sampling and fitting: once per network and data set.
    auto options = rfd::auto_fit_options();
    options.max_batch_size = training.count;
    const rfd::auto_fitted fitted =
        rfd::auto_fit(options, network.parameter_count, [&](std::uint64_t count, std::uint64_t seed) {
            random_t random{seed};
            network_initialise(&network, random_next(&random));
            for (std::size_t i = 0; i < count; i++) {
                std::swap(examples[i], examples[i + random_below(&random, training.count - i)]);
            }
            const double loss = gradient(network, training, examples.data(), count);
            double square = 0.0;
            for (std::size_t i = 0; i < network.parameter_count; i++) {
                square += double{network.gradients[i]} * network.gradients[i];
            }
            return rfd::batch_sample{loss, square};
        });
    std::printf("%sfitted to %llu examples: mean %g, variance %g (relative std %.2f)\n", fitted.warnings.c_str(),
                static_cast<unsigned long long>(fitted.fit.examples), fitted.fit.mean, fitted.fit.variance,
                fitted.fit.relative_std);
    const rfd::model model("squared_exponential", fitted.fit, network.parameter_count);

    // The optimizer and its tensors.
    auto method = rfd::fitted(model);
    method.inv_batch_size = 1.0 / batch_size;
    std::vector<rfd::tensor_spec> specs;
    std::vector<rfd_tensor> params;
    std::vector<rfd_gradient> grads;
    for (const network_tensor_t &tensor : network.tensors) {
        specs.push_back({tensor.name, {tensor.shape, tensor.shape + tensor.rank}});
        params.push_back(rfd::host_tensor(network.parameters + tensor.offset, tensor.count));
        grads.push_back(rfd::host_gradient(network.gradients + tensor.offset, tensor.count));
    }
    rfd::optimizer optimizer(method, rfd::optimizer_options(), specs);

    random_t random{1};
    network_initialise(&network, random_next(&random));
    for (int epoch = 1; epoch <= epochs; epoch++) {
        for (std::size_t i = training.count - 1; i > 0; i--) {
            std::swap(examples[i], examples[random_below(&random, i + 1)]);
        }
        const std::size_t steps = training.count / batch_size;
        double total = 0.0;
        for (std::size_t step = 0; step < steps; step++) {
            const double loss = gradient(network, training, examples.data() + step * batch_size, batch_size);
            const rfd_step_report report = optimizer.step(params, grads, rfd::step_input(loss));
            if (trace) {
                std::printf("step %llu loss %a grad_norm %a step_size %a\n",
                            static_cast<unsigned long long>(report.applied_steps), report.loss, report.grad_norm,
                            report.step_size);
            }
            total += report.loss;
        }
        double accuracy = 0.0;
        const double loss = network_evaluate(&network, &validation, &accuracy);
        std::printf("epoch %d: training loss %.4f, validation loss %.4f, accuracy %.2f %%\n", epoch, total / steps, loss,
                    100.0 * accuracy);
    }
}

} // namespace

int main(int argc, char **argv) {
    const bool trace = argc == 2 && std::strcmp(argv[1], "--trace") == 0;
    if (argc != 1 + trace) {
        std::fprintf(stderr, "usage: %s [--trace]\n", argv[0]);
        return 2;
    }
    try {
        rfd::check_abi();
        train(trace);
        return 0;
    } catch (const std::exception &failure) {
        std::fprintf(stderr, "%s\n", failure.what());
        return 1;
    }
}
