// A CUDA driver library whose one GPU is the kernels' CPU shim, so that the CUDA backend's own calls are
// tested without a GPU (scripts/test-fake-cuda). It ends the program where a call breaks a rule of CUDA that
// the backend relies on: no current context, an unbalanced stack of contexts, memory outside of any
// allocation, anything forbidden in a capture.
//
// FAKE_CUDA_VERSION, FAKE_CUDA_MAJOR, FAKE_CUDA_JIT and FAKE_CUDA_MACHINE_CODE change the driver's version,
// the compute capability, and whether PTX compiles and machine code is taken.

#include "../../kernels/abi.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

extern "C" int rfd_shim_launch(const char*, int, unsigned, const RfdStep*, const RfdTable*);

namespace {

// Values of cuda.h.
constexpr int SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, NOT_FOUND = 500, TOO_LARGE = 720, INVALID_PTX = 218,
              IMPLICIT_CAPTURE = 906, NO_BINARY = 209;
constexpr int MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76, COOPERATIVE = 95, POINTER_DEVICE = 9;

using Command = std::function<void()>;
using Graph = std::vector<Command>;

struct Stream {
    bool capturing = false;
    Graph graph;
};

std::mutex mutex;
std::map<uint64_t, size_t> device_memory, host_memory;
std::map<void*, Stream> streams;
thread_local std::vector<void*> contexts;
int retained = 0;
int primary;

[[noreturn]] void broken(const char* rule, const char* what = "")
{
    std::fprintf(stderr, "fake CUDA: %s %s\n", rule, what);
    std::abort();
}

void require_context()
{
    if (contexts.empty() || contexts.back() == nullptr) {
        broken("no current context");
    }
}

bool any_capture()
{
    for (const auto& [handle, stream] : streams) {
        if (stream.capturing) {
            return true;
        }
    }
    return false;
}

// CU_STREAM_CAPTURE_MODE_GLOBAL and _RELAXED.
constexpr int GLOBAL_MODE = 0, RELAXED = 2;
thread_local int capture_mode = GLOBAL_MODE;

// What a capture in global mode forbids to all threads that have not said that they know.
void forbid_unless_relaxed(const char* what)
{
    require_context();
    const std::lock_guard<std::mutex> lock(mutex);
    if (capture_mode != RELAXED && any_capture()) {
        broken("forbidden in a capture:", what);
    }
}

void forbid_in_capture(const char* what)
{
    require_context();
    const std::lock_guard<std::mutex> lock(mutex);
    if (any_capture()) {
        broken("forbidden in a capture:", what);
    }
}

// Runs a command now, or records it where the stream is captured.
int queue(void* handle, Command command)
{
    require_context();
    {
        const std::lock_guard<std::mutex> lock(mutex);
        if (reinterpret_cast<uintptr_t>(handle) <= 2) {
            if (any_capture()) {
                return IMPLICIT_CAPTURE;
            }
        } else {
            const auto stream = streams.find(handle);
            if (stream == streams.end()) {
                broken("an unknown stream");
            }
            if (stream->second.capturing) {
                stream->second.graph.push_back(std::move(command));
                return SUCCESS;
            }
        }
    }
    command();
    return SUCCESS;
}

void require_memory(uint64_t address, size_t size)
{
    const std::lock_guard<std::mutex> lock(mutex);
    auto allocation = device_memory.upper_bound(address);
    if (allocation == device_memory.begin() || address + size > std::prev(allocation)->first + std::prev(allocation)->second) {
        broken("memory that was not allocated");
    }
}

uint64_t filled(size_t size)
{
    void* memory = std::aligned_alloc(256, (size + 255) / 256 * 256);
    // Nothing may rely on fresh memory being zero.
    std::memset(memory, 0xCD, size);
    return reinterpret_cast<uint64_t>(memory);
}

int setting(const char* name, int otherwise)
{
    const char* value = std::getenv(name);
    return value != nullptr ? std::atoi(value) : otherwise;
}

// Device code, as text or machine code.
using Module = std::string;

// Where an ELF file ends: behind its last section or table of headers.
size_t elf_size(const unsigned char* image)
{
    const auto number = [](const unsigned char* at, size_t bytes) {
        uint64_t value = 0;
        std::memcpy(&value, at, bytes);
        return value;
    };
    const uint64_t sections = number(image + 40, 8), count = number(image + 60, 2);
    const uint64_t programs = number(image + 32, 8) + number(image + 54, 2) * number(image + 56, 2);
    uint64_t end = std::max(programs, sections + 64 * count);
    constexpr uint64_t NOBITS = 8;
    for (uint64_t k = 0; k < count; ++k) {
        const unsigned char* section = image + sections + 64 * k;
        if (number(section + 4, 4) != NOBITS) {
            end = std::max(end, number(section + 24, 8) + number(section + 32, 8));
        }
    }
    return end;
}

// What an image is loaded as; none where it is for another device.
Module* module_of(const void* image)
{
    const auto* bytes = static_cast<const unsigned char*>(image);
    if (std::memcmp(bytes, "\x7f" "ELF", 4) != 0) {
        return new Module(static_cast<const char*>(image));
    }
    if (reinterpret_cast<uintptr_t>(image) % 16 != 0) {
        broken("machine code that is not aligned");
    }
    // The architecture, in the header's flags.
    if (setting("FAKE_CUDA_MACHINE_CODE", 1) == 0 || bytes[48] / 10 != setting("FAKE_CUDA_MAJOR", 9)) {
        return nullptr;
    }
    return new Module(static_cast<const char*>(image), elf_size(bytes));
}

// The kernels of benches/support/ceiling.cu, of which only that counts which changes memory: there is no
// cache to sweep, and the host's work is done when it returns.
bool of_benchmark(const std::string& name, void** parameters, Command& command)
{
    if (name == "sweep" || name == "spin") {
        command = [] {};
        return true;
    }
    if (name != "ceiling") {
        return false;
    }
    const auto word = [&](int i) { return *static_cast<uint64_t*>(parameters[i]); };
    require_memory(word(0), 16 * word(2));
    require_memory(word(1), 16 * word(2));
    command = [p = word(0), g = word(1), count = 4 * word(2)] {
        for (uint64_t i = 0; i < count; ++i) {
            reinterpret_cast<float*>(p)[i] -= reinterpret_cast<const float*>(g)[i];
        }
    };
    return true;
}

int launch(void* function, unsigned grid, unsigned threads, void* stream, void** parameters, bool cooperative)
{
    const std::string name(static_cast<const char*>(function));
    if (Command command; of_benchmark(name, parameters, command)) {
        return queue(stream, command);
    }
    if (threads != RFD_THREADS) {
        broken("threads of a block");
    }
    if (cooperative && grid > 8) {
        return TOO_LARGE;
    }
    return queue(stream, [=, step = *static_cast<RfdStep*>(parameters[0]), table = *static_cast<RfdTable*>(parameters[1])] {
        if (rfd_shim_launch(name.c_str(), cooperative, grid, &step, &table) != 0) {
            broken("a launch that the shim refuses:", name.c_str());
        }
    });
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return SUCCESS; }

int cuDriverGetVersion(int* version)
{
    *version = setting("FAKE_CUDA_VERSION", 12010);
    return SUCCESS;
}

int cuGetErrorName(int, const char** text)
{
    *text = "CUDA_ERROR_FAKE";
    return SUCCESS;
}

int cuGetErrorString(int, const char** text)
{
    *text = "an error of the fake driver";
    return SUCCESS;
}

int cuDeviceGetCount(int* count)
{
    *count = 1;
    return SUCCESS;
}

int cuDeviceGet(int* device, int number)
{
    *device = number;
    return number == 0 ? SUCCESS : INVALID_DEVICE;
}

int cuDeviceGetName(char* name, int size, int)
{
    std::snprintf(name, static_cast<size_t>(size), "Fake GPU");
    return SUCCESS;
}

int cuDeviceGetAttribute(int* value, int attribute, int)
{
    switch (attribute) {
        case MULTIPROCESSORS: *value = 4; return SUCCESS;
        case MAJOR: *value = setting("FAKE_CUDA_MAJOR", 9); return SUCCESS;
        case MINOR: *value = 0; return SUCCESS;
        case COOPERATIVE: *value = 1; return SUCCESS;
        default: return INVALID_VALUE;
    }
}

int cuDevicePrimaryCtxRetain(void** context, int)
{
    const std::lock_guard<std::mutex> lock(mutex);
    ++retained;
    *context = &primary;
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int)
{
    const std::lock_guard<std::mutex> lock(mutex);
    if (--retained < 0) {
        broken("a context released too often");
    }
    return SUCCESS;
}

int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active)
{
    *flags = 0;
    *active = retained > 0;
    return SUCCESS;
}

int cuCtxPushCurrent_v2(void* context)
{
    contexts.push_back(context);
    return SUCCESS;
}

int cuCtxPopCurrent_v2(void** context)
{
    if (contexts.empty()) {
        broken("a context popped that was not pushed");
    }
    *context = contexts.back();
    contexts.pop_back();
    return SUCCESS;
}

int cuCtxSetCurrent(void* context)
{
    if (contexts.empty()) {
        contexts.push_back(context);
    } else {
        contexts.back() = context;
    }
    return SUCCESS;
}

int cuCtxGetCurrent(void** context)
{
    *context = contexts.empty() ? nullptr : contexts.back();
    return SUCCESS;
}

int cuCtxSynchronize()
{
    forbid_in_capture("cuCtxSynchronize");
    return SUCCESS;
}

int cuModuleLoadDataEx(void** module, const void* image, unsigned count, const int* options, void** values)
{
    forbid_unless_relaxed("cuModuleLoadDataEx");
    // CU_JIT_ERROR_LOG_BUFFER and CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES
    if (count != 2 || options[0] != 5 || options[1] != 6 || reinterpret_cast<uintptr_t>(values[1]) < 64) {
        broken("options of the compiler");
    }
    static_cast<char*>(values[0])[0] = 0;
    Module* loaded = module_of(image);
    if (loaded == nullptr) {
        return NO_BINARY;
    }
    if (loaded->front() != '\x7f' && setting("FAKE_CUDA_JIT", 1) == 0) {
        delete loaded;
        std::strcpy(static_cast<char*>(values[0]), "ptxas fatal: fake");
        return INVALID_PTX;
    }
    *module = loaded;
    return SUCCESS;
}

int cuModuleLoadData(void** module, const void* image)
{
    forbid_unless_relaxed("cuModuleLoadData");
    *module = module_of(image);
    return *module != nullptr ? SUCCESS : NO_BINARY;
}

int cuModuleUnload(void* module)
{
    require_context();
    delete static_cast<Module*>(module);
    return SUCCESS;
}

int cuModuleGetFunction(void** function, void* module, const char* name)
{
    forbid_unless_relaxed("cuModuleGetFunction");
    const Module& code = *static_cast<const Module*>(module);
    const std::string in_text = std::string(".entry ") + name + "(", in_machine_code = std::string(".text.") + name + '\0';
    if (code.find(in_text) == Module::npos && code.find(in_machine_code) == Module::npos) {
        return NOT_FOUND;
    }
    *function = strdup(name);
    return SUCCESS;
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int threads, size_t)
{
    require_context();
    *blocks = 2;
    return threads == RFD_THREADS ? SUCCESS : INVALID_VALUE;
}

int cuStreamCreate(void** stream, unsigned)
{
    require_context();
    const std::lock_guard<std::mutex> lock(mutex);
    *stream = std::malloc(1);
    streams[*stream] = {};
    return SUCCESS;
}

int cuStreamDestroy_v2(void* stream)
{
    require_context();
    const std::lock_guard<std::mutex> lock(mutex);
    if (streams.erase(stream) == 0) {
        broken("a stream destroyed twice");
    }
    std::free(stream);
    return SUCCESS;
}

int cuStreamSynchronize(void*)
{
    forbid_in_capture("cuStreamSynchronize");
    return SUCCESS;
}

int cuStreamIsCapturing(void* handle, int* status)
{
    require_context();
    const std::lock_guard<std::mutex> lock(mutex);
    const auto stream = streams.find(handle);
    *status = stream != streams.end() && stream->second.capturing;
    return SUCCESS;
}

int cuStreamBeginCapture_v2(void* handle, int)
{
    const std::lock_guard<std::mutex> lock(mutex);
    streams[handle] = {true, {}};
    return SUCCESS;
}

int cuStreamEndCapture(void* handle, void** graph)
{
    const std::lock_guard<std::mutex> lock(mutex);
    streams[handle].capturing = false;
    *graph = new Graph(streams[handle].graph);
    return SUCCESS;
}

int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long)
{
    *executable = graph;
    return SUCCESS;
}

int cuGraphLaunch(void* executable, void*)
{
    for (const Command& command : *static_cast<Graph*>(executable)) {
        command();
    }
    return SUCCESS;
}

int cuEventCreate(void** event, unsigned)
{
    require_context();
    *event = new std::chrono::steady_clock::time_point;
    return SUCCESS;
}

int cuEventRecord(void* event, void* stream)
{
    return queue(stream, [event] {
        *static_cast<std::chrono::steady_clock::time_point*>(event) = std::chrono::steady_clock::now();
    });
}

int cuEventElapsedTime(float* milliseconds, void* start, void* end)
{
    using Time = std::chrono::steady_clock::time_point;
    const std::chrono::duration<float, std::milli> elapsed = *static_cast<Time*>(end) - *static_cast<Time*>(start);
    *milliseconds = elapsed.count();
    return SUCCESS;
}

int cuMemAlloc_v2(uint64_t* address, size_t size)
{
    forbid_in_capture("cuMemAlloc");
    *address = filled(size);
    const std::lock_guard<std::mutex> lock(mutex);
    device_memory[*address] = size;
    return SUCCESS;
}

int cuThreadExchangeStreamCaptureMode(int* mode)
{
    std::swap(*mode, capture_mode);
    return SUCCESS;
}

int cuMemFree_v2(uint64_t address)
{
    forbid_unless_relaxed("cuMemFree");
    const std::lock_guard<std::mutex> lock(mutex);
    if (device_memory.erase(address) == 0) {
        broken("memory freed twice");
    }
    std::free(reinterpret_cast<void*>(address));
    return SUCCESS;
}

int cuMemHostAlloc(void** memory, size_t size, unsigned flags)
{
    forbid_in_capture("cuMemHostAlloc");
    // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
    if (flags != 3) {
        broken("flags of host memory");
    }
    const uint64_t address = filled(size);
    *memory = reinterpret_cast<void*>(address);
    const std::lock_guard<std::mutex> lock(mutex);
    host_memory[address] = size;
    return SUCCESS;
}

int cuMemHostGetDevicePointer_v2(uint64_t* address, void* memory, unsigned)
{
    require_context();
    *address = reinterpret_cast<uint64_t>(memory);
    return SUCCESS;
}

int cuMemFreeHost(void* memory)
{
    forbid_in_capture("cuMemFreeHost");
    const std::lock_guard<std::mutex> lock(mutex);
    if (host_memory.erase(reinterpret_cast<uint64_t>(memory)) == 0) {
        broken("host memory freed twice");
    }
    std::free(memory);
    return SUCCESS;
}

int cuMemsetD8Async(uint64_t address, unsigned char value, size_t count, void* stream)
{
    require_memory(address, count);
    return queue(stream, [=] { std::memset(reinterpret_cast<void*>(address), value, count); });
}

int cuMemsetD32Async(uint64_t address, unsigned value, size_t count, void* stream)
{
    require_memory(address, 4 * count);
    return queue(stream, [=] {
        for (size_t i = 0; i < count; ++i) {
            reinterpret_cast<unsigned*>(address)[i] = value;
        }
    });
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t size, void* stream)
{
    forbid_in_capture("a copy from pageable memory");
    require_memory(to, size);
    return queue(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), from, size); });
}

int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t size, void* stream)
{
    forbid_in_capture("a copy to pageable memory");
    require_memory(from, size);
    return queue(stream, [=] { std::memcpy(to, reinterpret_cast<const void*>(from), size); });
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void* stream)
{
    require_memory(to, size);
    require_memory(from, size);
    return queue(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), size); });
}

int cuLaunchKernel(void* function, unsigned grid, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned,
                   void* stream, void** parameters, void**)
{
    return launch(function, grid, threads, stream, parameters, false);
}

int cuLaunchCooperativeKernel(void* function, unsigned grid, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                              unsigned, void* stream, void** parameters)
{
    return launch(function, grid, threads, stream, parameters, true);
}

int cuPointerGetAttribute(void* value, int attribute, uint64_t address)
{
    const std::lock_guard<std::mutex> lock(mutex);
    const auto allocation = device_memory.upper_bound(address);
    if (attribute != POINTER_DEVICE || allocation == device_memory.begin() ||
        address >= std::prev(allocation)->first + std::prev(allocation)->second) {
        return INVALID_VALUE;
    }
    *static_cast<int*>(value) = 0;
    return SUCCESS;
}
}
