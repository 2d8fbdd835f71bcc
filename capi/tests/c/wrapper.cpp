// The C++ wrapper. Its argument is an empty folder.
#include <rfdescent.hpp>

#include "check.h"

#include <cmath>
#include <string>
#include <type_traits>

static_assert(std::is_nothrow_move_constructible_v<rfd::model> && !std::is_copy_constructible_v<rfd::model>);
static_assert(std::is_nothrow_move_constructible_v<rfd::optimizer>);
// What is only read may be const, and is no parameter.
static_assert(std::is_same_v<decltype(rfd::host_gradient(static_cast<const float *>(nullptr), 1)), rfd_gradient>);
static_assert(!std::is_convertible_v<rfd_gradient, rfd_tensor> && !std::is_convertible_v<rfd_tensor, rfd_gradient>);

template <class Call>
static rfd_status status_of(Call call) {
    try {
        call();
    } catch (const rfd::error &failure) {
        CHECK(std::string(failure.what()).size() > 5);
        return failure.status();
    }
    return RFD_OK;
}

static rfd::batch_sample sample(std::uint64_t batch_size, std::uint64_t seed) {
    const double u = static_cast<double>(seed >> 11) / 4503599627370496.0 - 1;
    const double size = static_cast<double>(batch_size);
    return {3 + u * std::sqrt(3 * (0.05 + 1 / size)), 2 + 100 / size};
}

struct thrown {
    int value;
};

static void estimation(const std::string &folder) {
    auto options = rfd::auto_fit_options();
    int calls = 0, reports = 0;
    // Exceptions of any type pass through, and the library works after them.
    try {
        rfd::auto_fit(options, 1000, [&](std::uint64_t batch_size, std::uint64_t seed) {
            if (++calls == 50) {
                throw thrown{7};
            }
            return sample(batch_size, seed);
        });
        CHECK(false);
    } catch (const thrown &caught) {
        CHECK(caught.value == 7 && calls == 50);
    }
    try {
        rfd::auto_fit(options, 1000, sample, [&](const rfd_progress &) -> bool {
            if (++reports == 5) {
                throw std::runtime_error("enough");
            }
            return true;
        });
        CHECK(false);
    } catch (const std::runtime_error &caught) {
        CHECK(caught.what() == std::string("enough"));
    }
    CHECK(status_of([&] { rfd::auto_fit(options, 1000, sample, [](const rfd_progress &) { return false; }); }) ==
          RFD_ERROR_STOPPED);
    CHECK(status_of([&] { rfd::auto_fit(options, 1000, {}); }) == RFD_ERROR_NULL);
    options.max_budget = 7000;
    options.tolerance = 0.001;
    const auto fitted = rfd::auto_fit(options, 1000, sample, [](const rfd_progress &) { return true; });
    CHECK(fitted.fit.batches == fitted.samples.batches() && fitted.fit.examples == fitted.samples.examples());
    CHECK(fitted.warnings.find("max_budget") != std::string::npos);
    CHECK(fitted.samples.fit().variance == fitted.fit.variance);
    rfd::statistics twice = rfd::statistics::from_json(fitted.samples.to_json());
    twice.merge(fitted.samples);
    twice.push(3, 4, 20);
    CHECK(twice.batches() == 2 * fitted.fit.batches + 1);
    CHECK(status_of([&] { twice.push(NAN, 4, 20); }) == RFD_ERROR_INVALID_ARGUMENT);
    CHECK(status_of([&] { twice.push_csv("nowhere"); }) == RFD_ERROR_IO);
    CHECK(status_of([&] { rfd::fit_csv("nowhere"); }) == RFD_ERROR_IO);

    // Many at once: the same samples. What was drawn before an exception counts, too many are refused.
    const auto sample_many = [](const std::vector<rfd::batch_request> &requests, std::vector<rfd::batch_sample> &drawn) {
        CHECK(!requests.empty() && requests.size() <= 16 && drawn.empty());
        for (const auto &request : requests) {
            drawn.push_back(sample(request.batch_size, request.seed));
        }
    };
    int seen = 0;
    const auto many = rfd::auto_fit_many(options, 1000, 16, sample_many, [&](const rfd_progress &) { return ++seen > 0; });
    CHECK(many.fit.batches == fitted.fit.batches && many.fit.mean == fitted.fit.mean && seen > 1);
    const std::string cache = folder + "/cache.csv";
    options.cache = cache.c_str();
    try {
        rfd::auto_fit_many(options, 1000, 16, [&](const auto &requests, auto &drawn) {
            sample_many(requests, drawn);
            drawn.resize(3);
            throw thrown{8};
        });
        CHECK(false);
    } catch (const thrown &caught) {
        CHECK(caught.value == 8);
    }
    rfd::statistics kept;
    kept.push_csv(cache);
    CHECK(kept.batches() == 3);
    options.cache = nullptr;
    CHECK(status_of([&] {
              rfd::auto_fit_many(options, 1000, 16, [&](const auto &requests, auto &drawn) {
                  sample_many(requests, drawn);
                  drawn.push_back({1, 1});
              });
          }) == RFD_ERROR_CALLBACK);
    CHECK(status_of([&] {
              rfd::auto_fit_many(options, 1000, 16, sample_many, [](const rfd_progress &) { return false; });
          }) == RFD_ERROR_STOPPED);
    CHECK(status_of([&] { rfd::auto_fit_many(options, 1000, 16, {}); }) == RFD_ERROR_NULL);
    CHECK(status_of([&] { rfd::auto_fit_many(options, 1000, 0, sample_many); }) == RFD_ERROR_INVALID_ARGUMENT);

    // From arrays.
    std::vector<double> losses, squares;
    std::vector<std::uint64_t> sizes;
    for (std::uint64_t i = 0; i < 200; i++) {
        sizes.push_back(i % 2 == 0 ? 20 : 200);
        const auto drawn = sample(sizes.back(), i * 0x9E3779B97F4A7C15);
        losses.push_back(drawn.loss);
        squares.push_back(drawn.sq_grad_norm);
    }
    const auto [fit, warnings] = rfd::fit_array(losses, squares, sizes);
    CHECK(warnings.empty());
    std::vector<double> blown = losses;
    blown[6] = 1.2e4;
    blown[7] = 1e4;
    const auto plain = rfd::fit_array(blown, squares, sizes);
    CHECK(plain.fit.variance > 1e3 && plain.warnings.find("samples 6 and 7 ") != std::string::npos);
    const auto robust = rfd::fit_array(blown, squares, sizes, RFD_FIT_ROBUST);
    CHECK(robust.fit.batches == 198 && robust.warnings.find("left out") != std::string::npos);
    rfd::statistics pushed;
    pushed.push_array(losses, squares, sizes);
    CHECK(pushed.fit().variance == fit.variance && fit.batches == 200);
    CHECK(rfd::fit_further_examples(fit, 10) == 0 && rfd::fit_further_examples(fit, 1e-4) > 1000);
    squares.pop_back();
    CHECK(status_of([&] { rfd::fit_array(losses, squares, sizes); }) == RFD_ERROR_INVALID_ARGUMENT);
    squares.push_back(-1);
    CHECK(status_of([&] { pushed.push_array(losses, squares, sizes); }) == RFD_ERROR_INVALID_ARGUMENT);
    sizes.pop_back();
    CHECK(status_of([&] { pushed.push_array(losses, squares, sizes); }) == RFD_ERROR_INVALID_ARGUMENT);
    CHECK(pushed.batches() == 200);

    const rfd::design design(0.05, 1.0, 20, 0, RFD_DESIGN_C_OPTIMAL);
    const auto points = design.points();
    CHECK(points.size() == 2 && points[0].first == 20 && design.quantile(0) == 20);
    CHECK(design.examples_needed(0.3) > 100 && !design.after(twice, 100).points().empty());
}

static void models_and_steps(const std::string &folder) {
    const rfd_moments moments{sizeof(rfd_moments), 2.5, 0.01, 0.9, 5, 300, 20000};
    CHECK(status_of([&] { rfd::model("unknown", moments); }) == RFD_ERROR_INVALID_ARGUMENT);
    rfd::model model("se", moments);
    model.save(folder + "/model.json");
    rfd::model moved = std::move(model);
    model = rfd::model::load(folder + "/model.json");
    CHECK(model.to_json() == moved.to_json() && model.moments().dims == 20000);
    CHECK(model.covariance() == "squared_exponential");
    CHECK(rfd::model::from_json(model.to_json()).length_scale() == model.length_scale());
    CHECK(model.step_size(2.5, 1.0) == model.plateau_step_size() && model.asymptotic_learning_rate(0) > 0);
    CHECK(model.conditional_mean(2, 1, 0, 0).value == 2 && model.conditional_variance(0, 1).value > 0);
    CHECK(status_of([&] { model.step_size(2, 0); }) == RFD_ERROR_NO_STEP);

    auto options = rfd::optimizer_options();
    const auto settings = rfd::group();
    options.groups = &settings;
    options.group_count = 1;
    rfd::optimizer optimizer(model, options, {{"w", {2, 2}}, {"b", {2}, RFD_DTYPE_F64}});
    std::vector<float> w{1, 2, 3, 4}, w_gradient{1, 0, 0, 2};
    std::vector<double> b{1, 1}, b_gradient{2, 0};
    const std::vector<rfd_tensor> params{rfd::host_tensor(w.data(), 4), rfd::host_tensor(b.data(), 2)};
    const std::vector<rfd_gradient> grads{rfd::host_gradient(w_gradient.data(), 4), rfd::host_gradient(b_gradient.data(), 2)};
    optimizer.check_step(params, grads, rfd::step_input(2.0));
    CHECK(optimizer.report().outcome == RFD_OUTCOME_NONE);
    const rfd_step_report report = optimizer.step(params, grads, rfd::step_input(2.0));
    CHECK(report.outcome == RFD_OUTCOME_APPLIED && report.grad_norm == 3 && w[0] < 1 && w[1] == 2);
    CHECK(optimizer.wait_report().step_size == report.step_size);
    CHECK(optimizer.sums_len() == 2);
    const double *sums = optimizer.local_sums(params, grads, rfd::step_input(2.0));
    CHECK(sums[0] == 9);
    optimizer.init_master_weights(params);
    optimizer.step_with_sums(params, grads, sums, rfd::step_input(2.0));
    CHECK(optimizer.report().applied_steps == 2);
    optimizer.save_state(folder + "/state");
    const std::string state = optimizer.state();
    optimizer.set_state(state);
    optimizer.load_state(folder + "/state");
    optimizer.set_multiplier(0.5);
    optimizer.set_max_step_size(1e-6);
    CHECK(optimizer.step(params, grads, rfd::step_input(2.0)).step_size == 1e-6);
    auto fitted = rfd::fitted(model);
    fitted.inv_batch_size = 0.01;
    fitted.momentum = 0.5;
    optimizer.set_fitted(fitted);
    CHECK(rfd::optimizer(fitted, options, {{"w", {2}}}).report().applied_steps == 0);
    fitted.mode = RFD_MODE_A_RFD;
    CHECK(status_of([&] { optimizer.set_fitted(fitted); }) == RFD_ERROR_INVALID_ARGUMENT);
    optimizer.set_weight_decay(0, 0.1);
    optimizer.set_group(0, settings);
    CHECK(status_of([&] { optimizer.set_multiplier(-1); }) == RFD_ERROR_INVALID_ARGUMENT);
    CHECK(status_of([&] { optimizer.step(params, {}, rfd::step_input(2.0)); }) == RFD_ERROR_INVALID_ARGUMENT);
    CHECK(status_of([&] { optimizer.step_on(&w, params, grads, rfd::step_input(2.0)); }) == RFD_ERROR_INVALID_ARGUMENT);
    CHECK(status_of([&] { rfd::optimizer(model, options, {{"w", {2}}, {"w", {2}}}); }) == RFD_ERROR_TENSOR);
    const rfd_tensor elsewhere = rfd::cuda_tensor(w.data(), 4, RFD_DTYPE_F32);
    CHECK(status_of([&] { optimizer.step({elsewhere, params[1]}, grads, rfd::step_input(2.0)); }) == RFD_ERROR_TENSOR);
}

static void adaptive_steps() {
    auto adaptive = rfd::adaptive();
    CHECK(adaptive.averaging == 0.85 && adaptive.loss_bound == -INFINITY);
    adaptive.loss_bound = 1;
    const auto options = rfd::optimizer_options();
    rfd::optimizer optimizer(adaptive, options, {{"w", {2}}, {"b", {}, RFD_DTYPE_F64}});
    std::vector<float> w{1, 2}, w_gradient{2, 1};
    double b = 1, b_gradient = 2;
    const std::vector<rfd_tensor> params{rfd::host_tensor(w.data(), 2), rfd::host_tensor(&b, 1)};
    const std::vector<rfd_gradient> grads{rfd::host_gradient(w_gradient.data(), 2), rfd::host_gradient(&b_gradient, 1)};
    CHECK(optimizer.step(params, grads, rfd::step_input()).outcome == RFD_OUTCOME_NON_FINITE_LOSS);
    CHECK(optimizer.step(params, grads, rfd::step_input(0.5)).outcome == RFD_OUTCOME_LOSS_BELOW_BOUND);
    const auto report = optimizer.step(params, grads, rfd::step_input(2));
    CHECK(report.outcome == RFD_OUTCOME_APPLIED && w[0] < 1 && b < 1);
    CHECK(report.trust == 1 && report.limit == RFD_LIMIT_RATE);
    /* Halves of a tensor of four, here and on a rank that has the same. */
    std::vector<rfd::optimizer> ranks;
    for (std::uint64_t start : {0, 2}) {
        rfd::tensor_spec part{"w", {2}};
        part.whole = {4};
        part.start = {start};
        ranks.emplace_back(adaptive, options, std::vector<rfd::tensor_spec>{part});
    }
    CHECK(ranks[0].sums_len() == 9 && ranks[1].sums_len() == 9);
    std::vector<float> halves[2] = {{1, 2}, {3, 4}};
    std::vector<std::vector<rfd_tensor>> held;
    std::vector<double *> sums;
    for (int rank = 0; rank < 2; rank++) {
        held.push_back({rfd::host_tensor(halves[rank].data(), 2)});
        sums.push_back(ranks[rank].local_sums(held[rank], {grads[0]}, rfd::step_input(2)));
    }
    for (int i = 0; i < 9; i++) sums[0][i] += sums[1][i];
    CHECK(sums[0][0] == 4 && sums[0][1] == 10 && sums[0][4] == 30 && sums[0][5] == 2 && sums[0][6] == 0);
    for (int rank = 0; rank < 2; rank++) {
        rfd_step_report done{};
        done.size = sizeof done;
        ranks[rank].step_with_sums(held[rank], {grads[0]}, sums[0], rfd::step_input(2), nullptr, &done);
        CHECK(done.outcome == RFD_OUTCOME_APPLIED && halves[rank][0] < 1 + 2 * rank);
    }
    CHECK(status_of([&] { ranks[0].step(held[0], {grads[0]}, rfd::step_input(2)); }) == RFD_ERROR_TENSOR);
    rfd::tensor_spec part{"w", {2}};
    part.whole = {4};
    CHECK(status_of([&] { rfd::optimizer(adaptive, options, {part}); }) == RFD_ERROR_INVALID_ARGUMENT);
    /* As one row of two, and as two of one. */
    std::vector<float> one{1, 2}, two = one;
    for (auto [place, row] : {std::pair{&one, 2}, {&two, 1}}) {
        rfd::tensor_spec spec{"w", {2}};
        spec.row = static_cast<std::uint64_t>(row);
        rfd::optimizer rows(rfd::adaptive(), options, {spec});
        rows.step({rfd::host_tensor(place->data(), 2)}, {rfd::host_gradient(w_gradient.data(), 2)},
                  rfd::step_input(2));
    }
    CHECK(one != two);
    adaptive.averaging = 1;
    CHECK(status_of([&] { rfd::optimizer(adaptive, options, {}); }) == RFD_ERROR_INVALID_ARGUMENT);
}

/* One array and tensor by tensor: the steps of the whole form. */
static void other_forms() {
    const auto options = rfd::optimizer_options();
    const std::vector<rfd::tensor_spec> specs{{"w", {2, 2}}, {"b", {3}}};
    rfd::optimizer whole(rfd::adaptive(), options, specs), flat(rfd::adaptive(), options, specs),
        by_tensor(rfd::adaptive(), options, specs);
    std::vector<float> p{1, 2, 3, 4, 5, 6, 7}, p2 = p, p3 = p, g{1, -1, 2, 0, 3, 1, -2};
    for (int i = 0; i < 5; i++) {
        const auto input = rfd::step_input(3 - 0.1 * i);
        const auto report = whole.step({rfd::host_tensor(p.data(), 4), rfd::host_tensor(&p[4], 3)},
                                       {rfd::host_gradient(g.data(), 4), rfd::host_gradient(&g[4], 3)}, input);
        const std::vector<float> &only_read = g;
        CHECK(flat.step_flat(p2.data(), only_read.data(), 7, input).step_size == report.step_size && p2 == p);
        by_tensor.give_gradient(1, &only_read[4], 3);
        by_tensor.give_gradient(0, only_read.data(), 4, RFD_DTYPE_F32);
        CHECK(by_tensor.finish({rfd::host_tensor(p3.data(), 4), rfd::host_tensor(&p3[4], 3)}, input).step_size ==
                  report.step_size &&
              p3 == p);
        g[static_cast<std::size_t>(i)] += 0.5f;
    }
    CHECK(status_of([&] { flat.step_flat(p2.data(), g.data(), 6, rfd::step_input(1)); }) == RFD_ERROR_INVALID_ARGUMENT);
    CHECK(status_of([&] { flat.step_flat_on(&p, p2.data(), g.data(), 7, RFD_DTYPE_F32, rfd::step_input(1)); }) ==
          RFD_ERROR_INVALID_ARGUMENT);
    CHECK(status_of([&] { by_tensor.finish({}, rfd::step_input(1)); }) == RFD_ERROR_INVALID_ARGUMENT);
    CHECK(status_of([&] { by_tensor.give_gradient(2, g.data(), 4); }) == RFD_ERROR_INVALID_ARGUMENT);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    rfd::check_abi();
    rfd::set_threads(1);
    CHECK(status_of([&] { rfd::set_threads(1025); }) == RFD_ERROR_INVALID_ARGUMENT);
    CHECK(rfd::version().size() >= 5 && rfd::status_string(RFD_ERROR_TENSOR) == "RFD_ERROR_TENSOR");
    estimation(argv[1]);
    models_and_steps(argv[1]);
    adaptive_steps();
    other_forms();
    std::printf("%d checks passed\n", checks);
}
