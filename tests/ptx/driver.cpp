// A CUDA driver library whose GPU executes the PTX itself, in the emulator. It ends the program where a call
// breaks a rule of CUDA that rfdescent's backend relies on, and where memory is used outside of allocations.
//
// PTXEMU_SEED      of the order in which warps run (default 1; each launch has another one)
// PTXEMU_BLOCKS    blocks that fit on the device at once (default 8)
// PTXEMU_REFUSE    not 0: cooperative launches are refused as too large
// PTXEMU_REPORT    folder for counts and coverage, written at exit
// PTXEMU_LANES     not 0: lanes of a warp that have parted take random turns (emulator.cpp)
// PTXEMU_RACES     not 0: searches for races (races.hpp)
// PTXEMU_RCP       1 to 4: other last bits of rcp.approx
// PTXEMU_TRACE     not 0: a line on stderr for each launch

#include "emulator.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <unistd.h>

namespace {

// Values of cuda.h.
constexpr int SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, NOT_FOUND = 500, TOO_LARGE = 720, IMPLICIT_CAPTURE = 906;
constexpr int MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76, COOPERATIVE = 95, POINTER_DEVICE = 9;

using Command = std::function<void()>;
using Graph = std::vector<Command>;

struct Stream {
    bool capturing = false;
    Graph graph;
};

struct Memory {
    size_t size;
    void* block;  // what is to be freed
    std::shared_ptr<std::vector<uint8_t>> init;
};

struct Function {
    std::shared_ptr<ptx::Module> module;
    std::string name;
};

std::mutex mutex;
std::map<uint64_t, Memory> device_memory, host_memory;
std::map<void*, Stream> streams;
thread_local std::vector<void*> contexts;
int retained = 0;
int primary;
std::atomic<uint64_t> launches;
std::atomic<unsigned> most_blocks = ~0u;
std::atomic<bool> refuses;

[[noreturn]] void broken(const char* rule, const char* what = "")
{
    std::fprintf(stderr, "emulated CUDA: %s %s\n", rule, what);
    std::abort();
}

long setting(const char* name, long otherwise)
{
    const char* value = std::getenv(name);
    return value != nullptr ? std::atol(value) : otherwise;
}

void require_context()
{
    if (contexts.empty() || contexts.back() == nullptr) broken("no current context");
}

bool any_capture()
{
    for (const auto& [handle, stream] : streams) {
        if (stream.capturing) return true;
    }
    return false;
}

thread_local int capture_mode = 0;

// What a capture in global mode forbids to all threads but those in relaxed mode, 2.
void forbid_unless_relaxed(const char* what)
{
    require_context();
    const std::lock_guard lock(mutex);
    if (capture_mode != 2 && any_capture()) broken("forbidden in a capture:", what);
}

void forbid_in_capture(const char* what)
{
    require_context();
    const std::lock_guard lock(mutex);
    if (any_capture()) broken("forbidden in a capture:", what);
}

// Runs a command now, or records it where the stream is captured.
int queue(void* handle, Command command)
{
    require_context();
    {
        const std::lock_guard lock(mutex);
        if (reinterpret_cast<uintptr_t>(handle) <= 2) {
            if (any_capture()) return IMPLICIT_CAPTURE;
        } else {
            const auto stream = streams.find(handle);
            if (stream == streams.end()) broken("an unknown stream");
            if (stream->second.capturing) {
                stream->second.graph.push_back(std::move(command));
                return SUCCESS;
            }
        }
    }
    command();
    return SUCCESS;
}

// The allocation that holds these bytes; `written` marks them.
void require_memory(uint64_t address, size_t size, bool written)
{
    const std::lock_guard lock(mutex);
    const auto after = device_memory.upper_bound(address);
    if (after == device_memory.begin()) broken("memory that was not allocated");
    auto& [begin, memory] = *std::prev(after);
    if (address + size > begin + memory.size) broken("memory that was not allocated");
    if (written) std::memset(memory.init->data() + (address - begin), 1, size);
}

// Bytes that begin `shift` bytes behind a multiple of 256.
uint64_t filled(size_t size, size_t shift, std::map<uint64_t, Memory>& to, bool followed)
{
    void* block = std::aligned_alloc(256, (size + shift + 256 + 255) / 256 * 256);
    // Nothing may rely on fresh memory being zero.
    std::memset(block, 0xCD, size + shift + 256);
    const uint64_t address = reinterpret_cast<uint64_t>(block) + shift;
    const std::lock_guard lock(mutex);
    to[address] = {size, block, followed ? std::make_shared<std::vector<uint8_t>>(size) : nullptr};
    return address;
}

int freed(uint64_t address, std::map<uint64_t, Memory>& from)
{
    require_context();
    const std::lock_guard lock(mutex);
    const auto memory = from.find(address);
    if (memory == from.end()) broken("memory freed twice");
    // Old contents must not be read.
    std::memset(reinterpret_cast<void*>(address), 0xDD, memory->second.size);
    std::free(memory->second.block);
    from.erase(memory);
    return SUCCESS;
}

void execute(const Function& function, unsigned grid, unsigned threads, bool cooperative,
             const std::vector<std::vector<char>>& parameters)
{
    ptx::Launch launch{};
    launch.kernel = function.name.c_str();
    launch.grid = grid;
    launch.block = threads;
    launch.cooperative = cooperative;
    std::vector<void*> pointers;
    for (const auto& p : parameters) pointers.push_back(const_cast<char*>(p.data()));
    launch.parameters = pointers.data();
    const uint64_t number = ++launches;
    launch.seed = static_cast<uint64_t>(setting("PTXEMU_SEED", 1)) * 1'000'003 + number;
    std::vector<std::shared_ptr<std::vector<uint8_t>>> held;
    {
        const std::lock_guard lock(mutex);
        auto device = device_memory.begin(), host = host_memory.begin();
        while (device != device_memory.end() || host != host_memory.end()) {
            const bool first = host == host_memory.end() || (device != device_memory.end() && device->first < host->first);
            auto& it = first ? device : host;
            const auto& init = it->second.init;
            launch.memory.push_back({it->first, it->first + it->second.size, init ? init->data() : nullptr, false});
            held.push_back(init);
            ++it;
        }
    }
    static const bool trace = setting("PTXEMU_TRACE", 0) != 0;
    if (trace) std::fprintf(stderr, "launch %s grid %u%s\n", launch.kernel, grid, cooperative ? " cooperative" : "");
    ptx::run(*function.module, launch);
}

int launch(void* handle, unsigned grid, unsigned threads, unsigned shared, void* stream, void** parameters, bool cooperative)
{
    if (shared != 0) broken("dynamic shared memory");
    if (grid == 0) return INVALID_VALUE;
    // The kernels promise the same bits on any grid.
    grid = std::min(grid, most_blocks.load());
    if (cooperative && (grid > static_cast<unsigned>(setting("PTXEMU_BLOCKS", 8)) || setting("PTXEMU_REFUSE", 0) != 0 || refuses)) return TOO_LARGE;
    const Function function = *static_cast<Function*>(handle);
    std::vector<std::vector<char>> copies;
    size_t k = 0;
    for (const size_t size : ptx::parameter_sizes(*function.module, function.name.c_str())) {
        const char* from = static_cast<const char*>(parameters[k++]);
        copies.emplace_back(from, from + size);
    }
    return queue(stream, [=] { execute(function, grid, threads, cooperative, copies); });
}

struct Report {
    ~Report()
    {
        if (const char* folder = std::getenv("PTXEMU_REPORT")) {
            ptx::write_report((std::string(folder) + "/" + std::to_string(getpid()) + ".tsv").c_str());
        }
    }
};

}  // namespace

extern "C" {

// Not of CUDA: memory of exactly this size, whose address is a multiple of 256 plus `shift`.
uint64_t ptxemu_allocate(size_t size, size_t shift)
{
    return filled(size, shift, device_memory, true);
}

// Not of CUDA: grids from now on have at most so many blocks; whether cooperative launches are refused.
void ptxemu_configure(unsigned blocks, int refuse)
{
    most_blocks = blocks;
    refuses = refuse != 0;
}

// Not of CUDA: launches so far.
uint64_t ptxemu_launches() { return launches; }

int cuInit(unsigned)
{
    static Report report;
    return SUCCESS;
}

int cuDriverGetVersion(int* version)
{
    *version = 12010;
    return SUCCESS;
}

int cuGetErrorName(int, const char** text)
{
    *text = "CUDA_ERROR_EMULATED";
    return SUCCESS;
}

int cuGetErrorString(int, const char** text)
{
    *text = "an error of the emulated driver";
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
    std::snprintf(name, static_cast<size_t>(size), "PTX emulator");
    return SUCCESS;
}

int cuDeviceGetAttribute(int* value, int attribute, int)
{
    switch (attribute) {
        case MULTIPROCESSORS: *value = static_cast<int>(setting("PTXEMU_BLOCKS", 8)); return SUCCESS;
        // For which the library has no machine code.
        case MAJOR: *value = 7; return SUCCESS;
        case MINOR: *value = 0; return SUCCESS;
        case COOPERATIVE: *value = setting("PTXEMU_COOPERATIVE", 1) != 0; return SUCCESS;
        default: return INVALID_VALUE;
    }
}

int cuDevicePrimaryCtxRetain(void** context, int)
{
    const std::lock_guard lock(mutex);
    ++retained;
    *context = &primary;
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int)
{
    const std::lock_guard lock(mutex);
    if (--retained < 0) broken("a context released too often");
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
    if (contexts.empty()) broken("a context popped that was not pushed");
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
    *module = new std::shared_ptr<ptx::Module>(ptx::load(static_cast<const char*>(image)));
    return SUCCESS;
}

int cuModuleUnload(void* module)
{
    require_context();
    delete static_cast<std::shared_ptr<ptx::Module>*>(module);
    return SUCCESS;
}

int cuModuleGetFunction(void** function, void* module, const char* name)
{
    forbid_unless_relaxed("cuModuleGetFunction");
    const auto& loaded = *static_cast<std::shared_ptr<ptx::Module>*>(module);
    if (!ptx::has_kernel(*loaded, name)) return NOT_FOUND;
    *function = new Function{loaded, name};
    return SUCCESS;
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t)
{
    require_context();
    *blocks = 1;
    return SUCCESS;
}

int cuStreamCreate(void** stream, unsigned)
{
    require_context();
    const std::lock_guard lock(mutex);
    *stream = std::malloc(1);
    streams[*stream] = {};
    return SUCCESS;
}

int cuStreamDestroy_v2(void* stream)
{
    require_context();
    const std::lock_guard lock(mutex);
    if (streams.erase(stream) == 0) broken("a stream destroyed twice");
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
    const std::lock_guard lock(mutex);
    const auto stream = streams.find(handle);
    *status = stream != streams.end() && stream->second.capturing;
    return SUCCESS;
}

int cuStreamBeginCapture_v2(void* handle, int)
{
    const std::lock_guard lock(mutex);
    streams[handle] = {true, {}};
    return SUCCESS;
}

int cuStreamEndCapture(void* handle, void** graph)
{
    const std::lock_guard lock(mutex);
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
    for (const Command& command : *static_cast<Graph*>(executable)) command();
    return SUCCESS;
}

int cuMemAlloc_v2(uint64_t* address, size_t size)
{
    forbid_in_capture("cuMemAlloc");
    *address = filled(size, 0, device_memory, true);
    return SUCCESS;
}

int cuThreadExchangeStreamCaptureMode(int* mode)
{
    std::swap(*mode, capture_mode);
    return SUCCESS;
}

int cuMemFree_v2(uint64_t address) { return freed(address, device_memory); }

int cuMemHostAlloc(void** memory, size_t size, unsigned flags)
{
    forbid_in_capture("cuMemHostAlloc");
    // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
    if (flags != 3) broken("flags of host memory");
    *memory = reinterpret_cast<void*>(filled(size, 0, host_memory, false));
    return SUCCESS;
}

int cuMemHostGetDevicePointer_v2(uint64_t* address, void* memory, unsigned)
{
    require_context();
    *address = reinterpret_cast<uint64_t>(memory);
    return SUCCESS;
}

int cuMemFreeHost(void* memory) { return freed(reinterpret_cast<uint64_t>(memory), host_memory); }

int cuMemsetD8Async(uint64_t address, unsigned char value, size_t count, void* stream)
{
    require_memory(address, count, true);
    return queue(stream, [=] { std::memset(reinterpret_cast<void*>(address), value, count); });
}

int cuMemsetD32Async(uint64_t address, unsigned value, size_t count, void* stream)
{
    require_memory(address, 4 * count, true);
    return queue(stream, [=] {
        for (size_t i = 0; i < count; ++i) reinterpret_cast<unsigned*>(address)[i] = value;
    });
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t size, void* stream)
{
    forbid_in_capture("a copy from pageable memory");
    require_memory(to, size, true);
    return queue(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), from, size); });
}

int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t size, void* stream)
{
    forbid_in_capture("a copy to pageable memory");
    require_memory(from, size, false);
    return queue(stream, [=] { std::memcpy(to, reinterpret_cast<const void*>(from), size); });
}

int cuLaunchKernel(void* function, unsigned grid, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared, void* stream, void** parameters, void**)
{
    if (y != 1 || z != 1 || ty != 1 || tz != 1) broken("a launch of more than one dimension");
    return launch(function, grid, threads, shared, stream, parameters, false);
}

int cuLaunchCooperativeKernel(void* function, unsigned grid, unsigned y, unsigned z, unsigned threads, unsigned ty,
                              unsigned tz, unsigned shared, void* stream, void** parameters)
{
    if (y != 1 || z != 1 || ty != 1 || tz != 1) broken("a launch of more than one dimension");
    return launch(function, grid, threads, shared, stream, parameters, true);
}

int cuPointerGetAttribute(void* value, int attribute, uint64_t address)
{
    const std::lock_guard lock(mutex);
    const auto after = device_memory.upper_bound(address);
    if (attribute != POINTER_DEVICE || after == device_memory.begin() ||
        address >= std::prev(after)->first + std::prev(after)->second.size) {
        return INVALID_VALUE;
    }
    *static_cast<int*>(value) = 0;
    return SUCCESS;
}
}
