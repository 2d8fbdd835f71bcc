// The scheduler: see cuda.hpp.

#include "block.hpp"

#include <fenv.h>
#include <pthread.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "launch.hpp"

thread_local Dim threadIdx, blockIdx, gridDim;

namespace shim {

namespace {

constexpr uint32_t THREADS = 256, WARPS = THREADS / 32;
constexpr size_t STACK = 64 << 10;
// As much as a kernel may declare on every GPU.
constexpr size_t SHARED = 48 << 10;

class Block;

struct Fiber {
    Block* block;
    uint32_t index;
    jmp_buf context;
    bool started;
    bool finished;
    // The fiber goes on when *waits_for is no longer `seen`.
    const uint64_t* waits_for;
    uint64_t seen;
};

struct Warp {
    uint64_t values[2][32];
    Collective kind;
    uint32_t arrived;
    uint64_t round;
};

// 256 fibers with their stacks; made once and used by many blocks, one at a time.
class Block {
public:
    Block()
    {
        void* memory = mmap(nullptr, STACK * THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        expect(memory != MAP_FAILED, "no memory for stacks");
        stacks_ = static_cast<char*>(memory);
        for (uint32_t i = 0; i < THREADS; ++i) {
            fibers_[i].block = this;
            fibers_[i].index = i;
            fibers_[i].started = false;
        }
    }

    ~Block() { munmap(stacks_, STACK * THREADS); }

    void run(const Job& job, uint32_t index)
    {
        job_ = &job;
        current_block() = this;
        blockIdx.x = index;
        gridDim.x = job.grid;
        // A signalling pattern: NaN as f64, absurd as an index.
        std::memset(shared_, 0xFF, sizeof shared_);
        std::minstd_rand random(static_cast<uint32_t>(job.seed * 2654435761u + index + 1));
        uint32_t warps[WARPS], lanes[32];
        for (uint32_t i = 0; i < WARPS; ++i) warps[i] = i;
        for (uint32_t i = 0; i < 32; ++i) lanes[i] = i;
        std::shuffle(warps, warps + WARPS, random);
        std::shuffle(lanes, lanes + 32, random);
        for (Fiber& fiber : fibers_) {
            fiber.finished = false;
            fiber.waits_for = nullptr;
        }
        for (Warp& warp : warps_) {
            warp = Warp{};
        }
        barrier_round_ = 0;
        arrived_ = 0;
        running_ = THREADS;
        while (running_ > 0) {
            bool progress = false;
            for (uint32_t warp : warps) {
                // A warp goes on until all of its lanes wait for something outside.
                for (bool again = true; again;) {
                    again = false;
                    for (uint32_t lane : lanes) {
                        Fiber& fiber = fibers_[warp * 32 + lane];
                        if (!fiber.finished && (!fiber.waits_for || *fiber.waits_for != fiber.seen)) {
                            resume(fiber);
                            again = progress = true;
                        }
                    }
                }
            }
            expect(progress, "a deadlock: threads wait at a barrier that others do not reach");
        }
    }

    void* shared(size_t size)
    {
        expect(size <= SHARED, "too much shared memory");
        return shared_;
    }

    // Waits for all threads of the block; the last to come first does `then`.
    template <class Then>
    void barrier(Then then)
    {
        expect(running_ == THREADS, "a barrier that some threads have left the kernel without");
        if (++arrived_ == THREADS) {
            arrived_ = 0;
            then();
            ++barrier_round_;
        } else {
            wait(barrier_round_);
        }
    }

    bool all(bool value)
    {
        if (arrived_ == 0) {
            verdict_[barrier_round_ % 2] = true;
        }
        bool& verdict = verdict_[barrier_round_ % 2];
        verdict = verdict && value;
        barrier([] {});
        return verdict;
    }

    void wait_for_grid()
    {
        expect(job_->barrier != nullptr, "a grid barrier in a launch that is not cooperative");
        barrier([this] { job_->barrier->arrive_and_wait(); });
    }

    const uint64_t* exchange(Collective kind, uint64_t value)
    {
        const uint32_t thread = current_->index;
        Warp& warp = warps_[thread / 32];
        expect(warp.arrived == 0 || warp.kind == kind, "lanes of a warp in different collectives");
        warp.kind = kind;
        uint64_t* values = warp.values[warp.round % 2];
        values[thread % 32] = value;
        if (++warp.arrived == 32) {
            warp.arrived = 0;
            ++warp.round;
        } else {
            wait(warp.round);
        }
        return values;
    }

    static Block*& current_block()
    {
        static thread_local Block* block;
        return block;
    }

private:
    static void enter(unsigned low, unsigned high)
    {
        Fiber& fiber = *reinterpret_cast<Fiber*>(static_cast<uintptr_t>(low) | static_cast<uintptr_t>(high) << 32);
        Block& block = *fiber.block;
        // Each turn of the loop is a thread of another block, perhaps on another OS thread.
        for (;;) {
            block.job_->kernel(*block.job_->step, *block.job_->table);
            fiber.finished = true;
            --block.running_;
            if (_setjmp(fiber.context) == 0) {
                _longjmp(block.scheduler_, 1);
            }
        }
    }

    void resume(Fiber& fiber)
    {
        current_ = &fiber;
        threadIdx.x = fiber.index;
        if (_setjmp(scheduler_) != 0) {
            return;
        }
        if (fiber.started) {
            _longjmp(fiber.context, 1);
        }
        fiber.started = true;
        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp = stacks_ + STACK * fiber.index;
        context.uc_stack.ss_size = STACK;
        context.uc_link = nullptr;
        const uintptr_t address = reinterpret_cast<uintptr_t>(&fiber);
        makecontext(&context, reinterpret_cast<void (*)()>(enter), 2, static_cast<unsigned>(address),
                    static_cast<unsigned>(address >> 32));
        setcontext(&context);
    }

    void wait(const uint64_t& round)
    {
        Fiber& fiber = *current_;
        fiber.waits_for = &round;
        fiber.seen = round;
        if (_setjmp(fiber.context) == 0) {
            _longjmp(scheduler_, 1);
        }
        fiber.waits_for = nullptr;
    }

    char* stacks_;
    const Job* job_;
    Fiber fibers_[THREADS];
    Fiber* current_;
    jmp_buf scheduler_;
    Warp warps_[WARPS];
    uint64_t barrier_round_;
    uint32_t arrived_;
    uint32_t running_;
    bool verdict_[2];
    alignas(16) unsigned char shared_[SHARED];
};

// Blocks that are not in use.
class Pool {
public:
    std::unique_ptr<Block> take()
    {
        const std::lock_guard lock(mutex_);
        if (free_.empty()) {
            return std::make_unique<Block>();
        }
        std::unique_ptr<Block> block = std::move(free_.back());
        free_.pop_back();
        return block;
    }

    void give_back(std::unique_ptr<Block> block)
    {
        const std::lock_guard lock(mutex_);
        free_.push_back(std::move(block));
    }

private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Block>> free_;
};

}  // namespace

void expect(bool condition, const char* problem)
{
    if (!condition) {
        std::fprintf(stderr, "kernels on the CPU: %s (block %u, thread %u)\n", problem, blockIdx.x, threadIdx.x);
        std::abort();
    }
}

void* shared_memory(size_t size) { return Block::current_block()->shared(size); }
void block_barrier() { Block::current_block()->barrier([] {}); }
bool block_all(bool value) { return Block::current_block()->all(value); }
void grid_barrier() { Block::current_block()->wait_for_grid(); }
const uint64_t* warp_exchange(Collective kind, uint64_t value)
{
    return Block::current_block()->exchange(kind, value);
}

void launch(Job job, bool cooperative)
{
    static Pool pool;
    std::barrier<> barrier(job.grid);
    job.barrier = cooperative ? &barrier : nullptr;
    const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
    const uint32_t workers = cooperative ? job.grid : std::min({job.grid, cores, MOST_BLOCKS});
    std::atomic<uint32_t> next = 0;
    auto work = [&] {
        // The caller's thread may flush subnormals or round otherwise.
        fesetenv(FE_DFL_ENV);
        std::unique_ptr<Block> block = pool.take();
        for (uint32_t i = next++; i < job.grid; i = next++) {
            // From a place that the seed decides, forwards.
            block->run(job, static_cast<uint32_t>((job.seed + i) % job.grid));
        }
        pool.give_back(std::move(block));
    };
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < workers; ++i) {
        threads.emplace_back(work);
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
}

}  // namespace shim
