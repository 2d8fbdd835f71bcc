// Trains the network of examples/c on a CUDA device: its own kernels for the network, the optimizer on the
// same stream, the whole training step captured in one graph that is replayed for every mini-batch. The host
// waits once an epoch.
//
//     train_cuda [--data FOLDER] [--epochs N]
//
// FOLDER has MNIST's IDX files, unpacked; without it the program makes data.
#include <rfdescent.hpp>

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../c/data.h"
#include "../c/network.h"
#include "../c/random.h"

namespace {

constexpr std::size_t batch_size = 128;
constexpr int threads = 256;
constexpr float epsilon = 1e-5f;

void cuda(cudaError_t status, const char *what) {
    if (status != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
    }
}

template <class T>
class device_array {
public:
    explicit device_array(std::size_t count) : count_(count) {
        cuda(cudaMalloc(&data_, count * sizeof(T)), "device memory");
        cuda(cudaMemset(data_, 0, count * sizeof(T)), "device memory");
        // The streams of this program do not wait for the default one, where that was queued.
        cuda(cudaDeviceSynchronize(), "device memory");
    }
    ~device_array() { cudaFree(data_); }
    device_array(device_array &&other) noexcept
        : data_(std::exchange(other.data_, nullptr)), count_(other.count_) {}
    device_array &operator=(device_array &&) = delete;

    T *get() const { return data_; }

    void upload(const T *from, std::size_t count, cudaStream_t stream) {
        cuda(cudaMemcpyAsync(data_, from, count * sizeof(T), cudaMemcpyHostToDevice, stream), "upload");
        cuda(cudaStreamSynchronize(stream), "upload");
    }

    void download(T *to, std::size_t count, cudaStream_t stream) const {
        cuda(cudaMemcpyAsync(to, data_, count * sizeof(T), cudaMemcpyDeviceToHost, stream), "download");
        cuda(cudaStreamSynchronize(stream), "download");
    }

private:
    T *data_ = nullptr;
    std::size_t count_;
};

// Sum over the block, in a fixed order; every thread gets it.
__device__ double block_sum(double value) {
    __shared__ double sums[threads];
    sums[threadIdx.x] = value;
    __syncthreads();
    for (int half = threads / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            sums[threadIdx.x] += sums[threadIdx.x + half];
        }
        __syncthreads();
    }
    const double total = sums[0];
    __syncthreads();
    return total;
}

__device__ std::size_t global_index() { return std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; }

// The examples `order[*batch * count ..]`.
__global__ void gather(float *input, std::uint8_t *batch_labels, const float *values, const std::uint8_t *labels,
                       const std::uint32_t *order, const std::uint32_t *batch, std::size_t count, std::size_t features) {
    const std::size_t i = global_index();
    if (i < count * features) {
        const std::size_t example = order[std::size_t{*batch} * count + i / features];
        input[i] = values[example * features + i % features];
        if (i % features == 0) {
            batch_labels[i / features] = labels[example];
        }
    }
}

__global__ void advance(std::uint32_t *batch) { ++*batch; }

// out[count][n] = in[count][m] * weight[n][m]^T
__global__ void linear(float *out, const float *in, const float *weight, std::size_t count, std::size_t n, std::size_t m) {
    const std::size_t i = global_index();
    if (i < count * n) {
        const float *x = in + i / n * m, *w = weight + i % n * m;
        float sum = 0;
        for (std::size_t k = 0; k < m; k++) {
            sum += x[k] * w[k];
        }
        out[i] = sum;
    }
}

// One block a unit: statistics of the batch, normalised values in place, scaled and shifted ones to `out`.
__global__ void batch_norm(float *out, float *normal, float *inverse_deviation, float *running_mean,
                           float *running_variance, const float *scale, const float *shift, std::size_t count,
                           std::size_t n, bool relu) {
    const std::size_t j = blockIdx.x;
    double sum = 0;
    for (std::size_t i = threadIdx.x; i < count; i += threads) {
        sum += normal[i * n + j];
    }
    const float mean = static_cast<float>(block_sum(sum) / count);
    double squares = 0;
    for (std::size_t i = threadIdx.x; i < count; i += threads) {
        const double deviation = normal[i * n + j] - mean;
        squares += deviation * deviation;
    }
    const float variance = static_cast<float>(block_sum(squares) / count);
    const float inverse = 1 / sqrtf(variance + epsilon);
    for (std::size_t i = threadIdx.x; i < count; i += threads) {
        const float value = (normal[i * n + j] - mean) * inverse;
        normal[i * n + j] = value;
        const float scaled = scale[j] * value + shift[j];
        out[i * n + j] = relu && scaled < 0 ? 0 : scaled;
    }
    if (threadIdx.x == 0) {
        inverse_deviation[j] = inverse;
        running_mean[j] += 0.1f * (mean - running_mean[j]);
        running_variance[j] += 0.1f * (variance - running_variance[j]);
    }
}

// One block: the mean loss, and its gradient with respect to the outputs.
__global__ void softmax(double *loss, float *gradient, const float *outputs, const std::uint8_t *labels, std::size_t count,
                        std::size_t classes) {
    double total = 0;
    for (std::size_t i = threadIdx.x; i < count; i += threads) {
        const float *row = outputs + i * classes;
        float largest = row[0];
        for (std::size_t j = 1; j < classes; j++) {
            largest = fmaxf(largest, row[j]);
        }
        double sum = 0;
        for (std::size_t j = 0; j < classes; j++) {
            sum += exp(static_cast<double>(row[j] - largest));
        }
        total += log(sum) - (row[labels[i]] - largest);
        for (std::size_t j = 0; j < classes; j++) {
            const double probability = exp(static_cast<double>(row[j] - largest)) / sum;
            gradient[i * classes + j] = static_cast<float>((probability - (j == labels[i])) / count);
        }
    }
    total = block_sum(total);
    if (threadIdx.x == 0) {
        *loss = total / count;
    }
}

// One block a unit: gradients of scale and shift, and of the linear map's output in place of that of the
// layer's.
__global__ void batch_norm_back(float *gradient, float *scale_gradient, float *shift_gradient, const float *normal,
                                const float *inverse_deviation, const float *scale, std::size_t count, std::size_t n) {
    const std::size_t j = blockIdx.x;
    double sum = 0, product = 0;
    for (std::size_t i = threadIdx.x; i < count; i += threads) {
        sum += gradient[i * n + j];
        product += gradient[i * n + j] * normal[i * n + j];
    }
    sum = block_sum(sum);
    product = block_sum(product);
    const float mean = static_cast<float>(sum / count), slope = static_cast<float>(product / count);
    const float factor = scale[j] * inverse_deviation[j];
    for (std::size_t i = threadIdx.x; i < count; i += threads) {
        gradient[i * n + j] = factor * (gradient[i * n + j] - mean - normal[i * n + j] * slope);
    }
    if (threadIdx.x == 0) {
        scale_gradient[j] = static_cast<float>(product);
        shift_gradient[j] = static_cast<float>(sum);
    }
}

// weight_gradient[n][m] = gradient[count][n]^T * in[count][m]
__global__ void weight_back(float *weight_gradient, const float *gradient, const float *in, std::size_t count, std::size_t n,
                            std::size_t m) {
    const std::size_t w = global_index();
    if (w < n * m) {
        float sum = 0;
        for (std::size_t i = 0; i < count; i++) {
            sum += gradient[i * n + w / m] * in[i * m + w % m];
        }
        weight_gradient[w] = sum;
    }
}

// below[count][m] = gradient[count][n] * weight[n][m], through the ReLU that made `in`.
__global__ void input_back(float *below, const float *gradient, const float *weight, const float *in, std::size_t count,
                           std::size_t n, std::size_t m) {
    const std::size_t i = global_index();
    if (i < count * m) {
        float sum = 0;
        for (std::size_t j = 0; j < n; j++) {
            sum += gradient[i / m * n + j] * weight[j * m + i % m];
        }
        below[i] = in[i] > 0 ? sum : 0;
    }
}

unsigned blocks(std::size_t work) { return static_cast<unsigned>((work + threads - 1) / threads); }

struct owned_data : data_t {
    owned_data(const char *folder, bool training) : data_t{} {
        const int failed =
            !folder ? data_make(this, training ? 6000 : 1000, 64, training ? 1 : 2)
            : training ? data_read(this, folder, "train-images-idx3-ubyte", "train-labels-idx1-ubyte")
                       : data_read(this, folder, "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte");
        if (failed != 0) {
            throw std::runtime_error("no data");
        }
    }
    ~owned_data() { data_free(this); }
    owned_data(const owned_data &) = delete;
    owned_data &operator=(const owned_data &) = delete;
};

// The network on the device. Shapes, initialisation and evaluation are the host's, which is in `host`.
class device_network {
public:
    device_network(const data_t &data, cudaStream_t stream)
        : parameters(prepare(data)), gradients(host.parameter_count), values_(data.count * data.features),
          labels_(data.count), order_(data.count), batch_(1), batch_labels_(data.count), loss(1),
          outputs_(data.count * data.classes), stream_(stream), features_(data.features) {
        values_.upload(data.values, data.count * data.features, stream);
        labels_.upload(data.labels, data.count, stream);
        // Samples may be as large as the data set.
        for (const network_layer_t &layer : host.layers) {
            layers_.push_back({device_array<float>(data.count * layer.inputs),
                               device_array<float>(data.count * layer.outputs),
                               device_array<float>(data.count * layer.outputs), device_array<float>(layer.outputs),
                               device_array<float>(layer.outputs), device_array<float>(layer.outputs)});
        }
    }
    ~device_network() { network_destroy(&host); }
    device_network(const device_network &) = delete;
    device_network &operator=(const device_network &) = delete;

    void initialise(std::uint64_t seed) {
        network_initialise(&host, seed);
        parameters.upload(host.parameters, host.parameter_count, stream_);
        for (std::size_t l = 0; l < layers_.size(); l++) {
            layers_[l].running_mean.upload(host.layers[l].running_mean, host.layers[l].outputs, stream_);
            layers_[l].running_variance.upload(host.layers[l].running_variance, host.layers[l].outputs, stream_);
        }
    }

    // In which order mini-batches take the examples, from the first on.
    void set_order(const std::vector<std::uint32_t> &order) {
        const std::uint32_t first = 0;
        order_.upload(order.data(), order.size(), stream_);
        batch_.upload(&first, 1, stream_);
    }

    // Queues loss and gradient of the next `count` examples.
    void gradient(std::size_t count) {
        gather<<<blocks(count * features_), threads, 0, stream_>>>(layers_[0].input.get(), batch_labels_.get(),
                                                                   values_.get(), labels_.get(), order_.get(),
                                                                   batch_.get(), count, features_);
        advance<<<1, 1, 0, stream_>>>(batch_.get());
        for (std::size_t l = 0; l < layers_.size(); l++) {
            const std::size_t m = host.layers[l].inputs, n = host.layers[l].outputs;
            const bool last = l + 1 == layers_.size();
            linear<<<blocks(count * n), threads, 0, stream_>>>(layers_[l].normal.get(), layers_[l].input.get(),
                                                               parameter(3 * l), count, n, m);
            batch_norm<<<static_cast<unsigned>(n), threads, 0, stream_>>>(
                last ? outputs_.get() : layers_[l + 1].input.get(), layers_[l].normal.get(),
                layers_[l].inverse_deviation.get(), layers_[l].running_mean.get(), layers_[l].running_variance.get(),
                parameter(3 * l + 1), parameter(3 * l + 2), count, n, !last);
        }
        softmax<<<1, threads, 0, stream_>>>(loss.get(), layers_.back().gradient.get(), outputs_.get(),
                                            batch_labels_.get(), count, host.widths[NETWORK_LAYERS]);
        for (std::size_t l = layers_.size(); l-- > 0;) {
            const std::size_t m = host.layers[l].inputs, n = host.layers[l].outputs;
            batch_norm_back<<<static_cast<unsigned>(n), threads, 0, stream_>>>(
                layers_[l].gradient.get(), of_gradients(3 * l + 1), of_gradients(3 * l + 2), layers_[l].normal.get(),
                layers_[l].inverse_deviation.get(), parameter(3 * l + 1), count, n);
            weight_back<<<blocks(n * m), threads, 0, stream_>>>(of_gradients(3 * l), layers_[l].gradient.get(),
                                                                layers_[l].input.get(), count, n, m);
            if (l > 0) {
                input_back<<<blocks(count * m), threads, 0, stream_>>>(layers_[l - 1].gradient.get(),
                                                                       layers_[l].gradient.get(), parameter(3 * l),
                                                                       layers_[l].input.get(), count, n, m);
            }
        }
        cuda(cudaGetLastError(), "kernels of the network");
    }

    double evaluate(const data_t &data, double &accuracy) {
        parameters.download(host.parameters, host.parameter_count, stream_);
        for (std::size_t l = 0; l < layers_.size(); l++) {
            layers_[l].running_mean.download(host.layers[l].running_mean, host.layers[l].outputs, stream_);
            layers_[l].running_variance.download(host.layers[l].running_variance, host.layers[l].outputs, stream_);
        }
        return network_evaluate(&host, &data, &accuracy);
    }

    float *parameter(std::size_t tensor) const { return parameters.get() + host.tensors[tensor].offset; }
    float *of_gradients(std::size_t tensor) const { return gradients.get() + host.tensors[tensor].offset; }

    network_t host{};
    device_array<float> parameters, gradients;

private:
    struct layer {
        device_array<float> input, normal, gradient, inverse_deviation, running_mean, running_variance;
    };

    std::size_t prepare(const data_t &data) {
        const std::size_t widths[] = {data.features, 128, data.classes};
        if (network_create(&host, widths) != 0) {
            throw std::bad_alloc();
        }
        return host.parameter_count;
    }

    device_array<float> values_;
    device_array<std::uint8_t> labels_;
    device_array<std::uint32_t> order_, batch_;
    device_array<std::uint8_t> batch_labels_;

public:
    device_array<double> loss;

private:
    device_array<float> outputs_;
    std::vector<layer> layers_;
    cudaStream_t stream_;
    std::size_t features_;
};

void train(const char *folder, int epochs) {
    const owned_data training(folder, true), validation(folder, false);
    cudaStream_t stream;
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    device_network network(training, stream);
    std::vector<std::uint32_t> order(training.count);
    std::iota(order.begin(), order.end(), 0);

    // Sampling and fitting: once per network and data set.
    auto options = rfd::auto_fit_options();
    options.max_batch_size = training.count;
    std::vector<float> gradient(network.host.parameter_count);
    const rfd::auto_fitted fitted = rfd::auto_fit(
        options, network.host.parameter_count, [&](std::uint64_t count, std::uint64_t seed) {
            random_t random{seed};
            network.initialise(random_next(&random));
            for (std::size_t i = 0; i < count; i++) {
                std::swap(order[i], order[i + random_below(&random, training.count - i)]);
            }
            network.set_order(order);
            network.gradient(count);
            double loss, square = 0;
            network.loss.download(&loss, 1, stream);
            network.gradients.download(gradient.data(), gradient.size(), stream);
            for (const float g : gradient) {
                square += double{g} * g;
            }
            return rfd::batch_sample{loss, square};
        });
    std::printf("%sfitted to %llu examples: mean %g, variance %g (relative std %.2f)\n", fitted.warnings.c_str(),
                static_cast<unsigned long long>(fitted.fit.examples), fitted.fit.mean, fitted.fit.variance,
                fitted.fit.relative_std);
    const rfd::model model("squared_exponential", fitted.fit, network.host.parameter_count);

    // The optimizer: parameters, gradients and the loss stay on the device.
    auto method = rfd::fitted(model);
    method.inv_batch_size = 1.0 / batch_size;
    auto settings = rfd::optimizer_options();
    settings.device_kind = RFD_DEVICE_CUDA;
    std::vector<rfd::tensor_spec> specs;
    std::vector<rfd_tensor> params;
    std::vector<rfd_gradient> grads;
    for (std::size_t k = 0; k < NETWORK_TENSORS; k++) {
        const network_tensor_t &tensor = network.host.tensors[k];
        specs.push_back({tensor.name, {tensor.shape, tensor.shape + tensor.rank}});
        params.push_back(rfd::cuda_tensor(network.parameter(k), tensor.count, RFD_DTYPE_F32));
        grads.push_back(rfd::cuda_gradient(network.of_gradients(k), tensor.count, RFD_DTYPE_F32));
    }
    rfd::optimizer optimizer(method, settings, specs);
    auto input = rfd::step_input();
    input.loss_address = network.loss.get();
    input.loss_dtype = RFD_DTYPE_F64;

    random_t random{1};
    network.initialise(random_next(&random));

    // One training step as a graph: mini-batch, forward, backward, optimizer.
    cudaGraph_t graph;
    cudaGraphExec_t step;
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    network.gradient(batch_size);
    optimizer.step_on(stream, params, grads, input);
    cuda(cudaStreamEndCapture(stream, &graph), "capture");
    cuda(cudaGraphInstantiate(&step, graph, 0), "graph");

    for (int epoch = 1; epoch <= epochs; epoch++) {
        for (std::size_t i = training.count - 1; i > 0; i--) {
            std::swap(order[i], order[random_below(&random, i + 1)]);
        }
        network.set_order(order);
        for (std::size_t k = 0; k < training.count / batch_size; k++) {
            cuda(cudaGraphLaunch(step, stream), "training step");
        }
        const rfd_step_report report = optimizer.wait_report(stream);
        double accuracy;
        const double loss = network.evaluate(validation, accuracy);
        std::printf("epoch %d: %llu steps, last loss %.4f and step size %.4g, validation loss %.4f, accuracy %.2f %%\n",
                    epoch, static_cast<unsigned long long>(report.applied_steps), report.loss, report.step_size, loss,
                    100 * accuracy);
    }
    cudaGraphExecDestroy(step);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
}

} // namespace

int main(int argc, char **argv) {
    const char *folder = nullptr;
    int epochs = 3;
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : nullptr;
        if (value && !std::strcmp(argv[i], "--data")) {
            folder = value;
        } else if (value && !std::strcmp(argv[i], "--epochs")) {
            epochs = std::atoi(value);
        } else {
            std::fprintf(stderr, "usage: %s [--data FOLDER] [--epochs N]\n", argv[0]);
            return 2;
        }
    }
    try {
        rfd::check_abi();
        train(folder, epochs);
        return 0;
    } catch (const std::exception &failure) {
        std::fprintf(stderr, "%s\n", failure.what());
        return 1;
    }
}
