// Linear layers over codes, bit for bit against loops in whole numbers and single roundings.
#pragma once

#include "../linear/quantized_linear.h"
#include "check_linear.h"

extern "C" void tessera_pack_codes(const void* codes, int64_t outputs, int64_t inputs, int bits, int64_t group,
                                   int epilogue, void* panels);

namespace self_test {

using tessera::Quantized;

struct CodeForm {
    int format, digits, scale_type;
    int64_t group;
    bool zeros, minima, ordered;
    int run_shift = -1;  // of factors; below zero: there are none
    bool far = false;    // whether some scales are far from one

    int bits() const {
        using namespace tessera;
        return format == BYTES ? 8 : format == FIVES ? 5 : format == SIXES ? 6 : 4;
    }
};

constexpr int64_t CODE_ROWS_TRIED = 37;
constexpr int NUMBERS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 0, 13, 25, 38, 53, 69, 89, 113};

// A layer of codes, packed and as it was drawn.
struct Coded {
    CodeForm form;
    int64_t outputs, inputs, group, groups;
    std::vector<uint8_t> codes, zeros;  // [outputs, inputs], [outputs, groups]
    std::vector<float> scales, minima;  // as numbers of their type, those of a run's groups equal
    std::vector<int8_t> factors, minimum_factors;
    std::vector<int32_t> order;

    std::vector<int32_t> units;
    std::vector<uint8_t> packed_scales, packed_minima, packed_zeros, packed_factors, packed_minimum_factors;
    Quantized quantized;
    Linear layer;

    Coded(const CodeForm& form, int64_t outputs, int64_t inputs)
        : form(form), outputs(outputs), inputs(inputs), group(form.group ? form.group : inputs),
          groups((inputs + group - 1) / group) {
        const int most = (1 << form.bits()) - 1;
        for (int64_t i = 0; i < outputs * inputs; i++) codes.push_back((uint8_t)(numbers()() & most));
        for (int64_t i = 0; i < outputs * groups; i++) {
            zeros.push_back((uint8_t)(numbers()() % (form.format == tessera::BYTES ? 256 : 17)));
            const bool same = form.run_shift > 0 && i % groups & ((1 << form.run_shift) - 1);
            scales.push_back(same ? scales.back() : draw_scale());
            minima.push_back(same ? minima.back() : -draw_scale());
            factors.push_back((int8_t)(numbers()() % 256 - 128));
            minimum_factors.push_back((int8_t)(numbers()() % 256 - 128));
        }
        for (int64_t k = 0; k < inputs; k++) order.push_back((int32_t)(inputs - 1 - k));
        pack();
    }

    // The whole number that a code stands for; with minima they count as they are.
    int64_t number(int64_t column, int64_t k) const {
        const int64_t code = codes[column * inputs + k], place = column * groups + k / group;
        if (form.format == tessera::TABLE) return NUMBERS[code];
        if (form.minima) return code;
        if (form.zeros) return code - zeros[place];
        return code - (1 << (form.bits() - 1));
    }

    float scale(int64_t place) const { return form.run_shift < 0 ? scales[place] : scales[place] * factors[place]; }
    float minimum(int64_t place) const {
        return form.run_shift < 0 ? minima[place] : minima[place] * minimum_factors[place];
    }

private:
    float draw_scale() const {
        const uint32_t drawn = numbers()() % 64;
        if (drawn < 2) return 0;
        const float scale = (form.far && drawn < 8 ? 0x1p-80f : 0.001f) * (float)(1 + numbers()() % 1000) / 512;
        if (form.scale_type == tessera::FLOAT32) return scale;
        if (form.scale_type == tessera::FLOAT16) {  // eleven bits, fewer where it is denormal
            const int exponent = std::max(std::ilogb(scale) - 10, -24);
            return std::ldexp(std::nearbyint(std::ldexp(scale, -exponent)), exponent);
        }
        return tessera::BFloat16::widen(element<tessera::BFloat16>(scale));
    }

    uint16_t half(float x) const {
        uint32_t word;
        std::memcpy(&word, &x, 4);
        if (form.scale_type == tessera::BFLOAT16) return (uint16_t)(word >> 16);
        const int exponent = (int)(word >> 23 & 255) - 112;
        const uint16_t sign = (uint16_t)(word >> 16 & 0x8000);
        if (exponent <= 0) return (uint16_t)(sign | (int)std::ldexp(std::fabs(x), 24));
        return (uint16_t)(sign | exponent << 10 | (word >> 13 & 1023));
    }

    template <class E, class Of>
    std::vector<uint8_t> arranged(Of of, int shift = 0) const {
        const int64_t panels = (outputs + PANEL - 1) / PANEL, runs = ((groups - 1) >> shift) + 1;
        std::vector<uint8_t> to(panels * runs * PANEL * sizeof(E));
        for (int64_t column = 0; column < outputs; column++)
            for (int64_t run = 0; run < runs; run++) {
                const E value = of(column * groups + (run << shift));
                const int64_t place = (column / PANEL * runs + run) * PANEL + column % PANEL;
                std::memcpy(to.data() + place * sizeof(E), &value, sizeof(E));
            }
        return to;
    }

    std::vector<uint8_t> arranged_numbers(const std::vector<float>& from) const {
        const int shift = std::max(form.run_shift, 0);
        if (form.scale_type == tessera::FLOAT32) return arranged<float>([&](int64_t i) { return from[i]; }, shift);
        return arranged<uint16_t>([&](int64_t i) { return half(from[i]); }, shift);
    }

    void pack() {
        const int bits = form.bits();
        std::vector<uint8_t> stored(bits > 4 ? codes.size() : codes.size() / 2);
        for (size_t i = 0; i < codes.size(); i++)
            if (bits > 4) stored[i] = codes[i];
            else stored[i / 2] |= (uint8_t)(codes[i] << i % 2 * 4);
        const tessera::InputGroups split(inputs, group, 4 * tessera::byte_words(form.format));
        units.resize((outputs + PANEL - 1) / PANEL * tessera::panel_words(split, form.format));
        tessera_pack_codes(stored.data(), outputs, inputs, bits, group, tessera::PLAIN, units.data());
        packed_scales = arranged_numbers(scales);
        packed_minima = arranged_numbers(minima);
        packed_zeros = arranged<uint8_t>([&](int64_t i) { return zeros[i]; });
        packed_factors = arranged<int8_t>([&](int64_t i) { return factors[i]; });
        packed_minimum_factors = arranged<int8_t>([&](int64_t i) { return minimum_factors[i]; });
        const bool factored = form.run_shift >= 0;
        const int zero = form.minima ? 0 : form.format == tessera::TABLE ? 128 : 1 << (bits - 1);
        quantized = {packed_scales.data(), form.minima ? packed_minima.data() : nullptr,
                     factored ? (const int8_t*)packed_factors.data() : nullptr,
                     factored ? (const int8_t*)packed_minimum_factors.data() : nullptr,
                     form.zeros ? packed_zeros.data() : nullptr, form.ordered ? order.data() : nullptr, group,
                     form.format, form.scale_type, form.digits, zero, std::max(form.run_shift, 0), {}};
        for (int i = 0; i < 16; i++) quantized.table[i] = (uint8_t)(NUMBERS[i] + 128);
        layer = {units.data(), nullptr, inputs, outputs, tessera::PLAIN, tessera::WIDE, &quantized};
    }
};

// Whole numbers of a group of inputs, and their step.
inline float whole_numbers(const float* x, int64_t count, int digits, int64_t* p) {
    float most = 0;
    for (int64_t k = 0; k < count; k++) most = std::max(most, std::fabs(x[k]));
    std::fill(p, p + count, 0);
    if (most < 0x1p-100f) return 0;
    const int exponent = std::ilogb(most) + 1;
    const float step = digits == 2 ? std::ldexp(1.0f, exponent - 13) : most / 127.0f;
    const float per_step = digits == 2 ? std::ldexp(1.0f, 13 - exponent) : 127.0f / most;
    for (int64_t k = 0; k < count; k++) p[k] = std::llrint((double)x[k] * per_step);
    return step;
}

// Row by row, column by column.
inline std::vector<float> coded_sums(const Coded& coded, const std::vector<float>& x) {
    const int64_t inputs = coded.inputs;
    std::vector<float> found, row(inputs);
    std::vector<int64_t> p(inputs);
    for (size_t first = 0; first < x.size(); first += inputs) {
        for (int64_t k = 0; k < inputs; k++) row[k] = x[first + (coded.form.ordered ? coded.order[k] : k)];
        std::vector<float> steps, shifts;
        for (int64_t k = 0; k < inputs; k += coded.group) {
            const int64_t count = std::min(coded.group, inputs - k);
            steps.push_back(whole_numbers(&row[k], count, coded.form.digits, &p[k]));
            int64_t sum = 0;
            for (int64_t i = k; i < k + count; i++) sum += p[i];
            shifts.push_back(steps.back() * (float)sum);
        }
        for (int64_t c = 0; c < coded.outputs; c++) {
            float y = 0;
            for (int64_t g = 0; g < coded.groups; g++) {
                int64_t high = 0, low = 0;
                for (int64_t k = g * coded.group; k < std::min(inputs, (g + 1) * coded.group); k++) {
                    const int64_t h = coded.form.digits == 2 ? (p[k] + 64) >> 7 : p[k];
                    high += h * coded.number(c, k);
                    low += (p[k] - 128 * h) * coded.number(c, k);
                }
                float sum = (float)high;
                if (coded.form.digits == 2) sum = std::fma(sum, 128.0f, (float)low);
                const int64_t place = c * coded.groups + g;
                y = std::fma(sum, coded.scale(place) * steps[g], y);
                if (coded.form.minima) y = std::fma(coded.minimum(place), shifts[g], y);
            }
            found.push_back(y);
        }
    }
    return found;
}

template <class T>
void check_coded(Check& check, const CodeForm& form, int64_t outputs, int64_t inputs) {
    const Coded coded(form, outputs, inputs);
    auto x = elements<T>(drawn<T>(CODE_ROWS_TRIED, inputs));
    for (int64_t k = 0; k < inputs; k++) x[5 * inputs + k] = element<T>(0);            // a row of zeros
    for (int64_t k = 0; k < std::min<int64_t>(inputs, 9); k++) x[k] = element<T>(0x1p-110);  // next to nothing
    std::vector<float> wide(x.size());
    std::transform(x.begin(), x.end(), wide.begin(), T::widen);
    const auto right = coded_sums(coded, wide);
    for (int64_t rows = 1; rows <= CODE_ROWS_TRIED; rows += rows < 14 ? 1 : 23) {
        const auto y = applied<float>(TYPE<T>, coded.layer, x, CODE_ROWS_TRIED - rows, rows);
        check.same(y, right, right.size() - y.size(), "sums of codes");
    }
}

#if TESSERA_TILES

// The tiles' bits are the vectors', of as many rows as two passes have and of fewer than tiles are meant for.
template <class T>
void check_code_tiles_of(Check& check, const CodeForm& form, int64_t outputs, int64_t inputs) {
    Coded coded(form, outputs, inputs);
    if (!tessera::suits_tiles(coded.layer)) return;
    auto x = elements<T>(drawn<T>(70, inputs));
    for (int64_t k = 0; k < inputs; k++) x[5 * inputs + k] = element<T>(0);
    x[7 * inputs + inputs / 2] = element<T>(INFINITY);
    tessera::Pool pool(2);
    for (int result : {tessera::WIDE, tessera::LARGEST})
        for (int64_t rows = 1; rows <= 70; rows++) {
            if (rows > 34 && rows % 12 < 10) continue;
            coded.layer.result = result;
            const int64_t columns = result == tessera::WIDE ? outputs : 1;
            const size_t each = result == tessera::WIDE ? sizeof(float) : sizeof(Largest);
            std::vector<char> found[2];
            for (int by_tiles : {0, 1}) {
                found[by_tiles].resize(rows * columns * each);
                tessera::multiply_coded<T>(pool, coded.layer, x.data() + (70 - rows) * inputs, inputs,
                                           found[by_tiles].data(), columns, rows, nullptr, by_tiles);
            }
            check.same(found[1], found[0], 0, "sums of codes by tiles");
        }
}

template <class T>
void check_code_tiles() {
    using namespace tessera;
    Check check("linear, tiles", TYPE<T>);
    for (int digits : {1, 2})
        for (int format : {BYTES, NIBBLES, TABLE, FIVES, SIXES})
            for (int64_t group : {0, 32, 64, 96, 128}) {
                const int type = (int)(group / 32 + digits) % 3;
                const bool half = format != TABLE && format != FIVES && format != SIXES;
                check_code_tiles_of<T>(check, {format, digits, type, group, false, false, group == 64}, PANEL + 3, 198);
                check_code_tiles_of<T>(check, {format, digits, type, group, false, false, false}, 5, 1152);
                if (half) check_code_tiles_of<T>(check, {format, digits, type, group, true, false, false}, 2 * PANEL, 256);
                if (format != TABLE) check_code_tiles_of<T>(check, {format, digits, type, group, false, true, false}, 7, 224);
                check_code_tiles_of<T>(check, {format, digits, type, 32, false, format != TABLE, false, 1}, PANEL, 326);
            }
    // Rows whose digits take several passes.
    for (int digits : {1, 2}) check_code_tiles_of<T>(check, {BYTES, digits, FLOAT32, 0, false, false, false}, 3 * PANEL, 30000);
}

#endif

// A number that is none spoils its row, and no other.
template <class T>
void check_spoilt(Check& check, int format, int rows) {
    const Coded coded({format, 2, tessera::FLOAT32, 32, false, false, false}, PANEL, 96);
    auto x = elements<T>(drawn<T>(rows, 96));
    const auto right = applied<float>(TYPE<T>, coded.layer, x, 0, rows);
    x[96 + 40] = element<T>(NAN);
    const auto y = applied<float>(TYPE<T>, coded.layer, x, 0, rows);
    const std::vector<float> first(y.begin(), y.begin() + PANEL), last(y.begin() + 2 * PANEL, y.end());
    check.same(first, right, 0, "a row beside one that is no number");
    check.same(last, right, 2 * PANEL, "rows beside one that is no number");
    std::vector<int> none(PANEL, 1), found;
    for (int64_t c = 0; c < PANEL; c++) found.push_back(std::isnan(y[PANEL + c]));
    check.same(found, none, 0, "a row with what is no number");
}

template <class T>
void check_quantized() {
    using namespace tessera;
    Check check("linear, codes", TYPE<T>);
    for (int rows : {3, 20})
        for (int format : {BYTES, NIBBLES}) check_spoilt<T>(check, format, rows);
    for (int format : {BYTES, NIBBLES, FIVES}) {
        check_coded<T>(check, {format, 2, FLOAT32, 32, false, false, false, -1, true}, PANEL, 96);
        check_coded<T>(check, {format, 2, FLOAT32, 32, false, true, false, -1, true}, PANEL, 96);
    }
    for (int digits : {1, 2})
        for (int format : {BYTES, NIBBLES, TABLE})
            for (int64_t group : {0, 8, 20, 64, 128}) {
                const int type = (int)(group / 4 + digits) % 3;
                check_coded<T>(check, {format, digits, type, group, false, false, group == 20}, PANEL + 3, 198);
                check_coded<T>(check, {format, digits, type, group, false, false, false}, 5, 1090);
                if (format == TABLE) continue;
                check_coded<T>(check, {format, digits, type, group, true, false, false}, PANEL - 1, 198);
                check_coded<T>(check, {format, digits, type, group, false, true, group == 64}, 2 * PANEL, 198);
            }
    for (int digits : {1, 2})
        for (int format : {FIVES, SIXES})
            for (int64_t group : {0, 32, 128}) {
                const int type = (int)(group / 4 + digits) % 3;
                check_coded<T>(check, {format, digits, type, group, false, false, group == 32}, PANEL + 3, 198);
                check_coded<T>(check, {format, digits, type, group, false, true, false}, 5, 1090);
            }
    for (int digits : {1, 2})
        for (int format : {BYTES, NIBBLES, TABLE, FIVES, SIXES})
            for (int run_shift : {0, 1, 3}) {
                const int type = (run_shift + digits) % 3;
                check_coded<T>(check, {format, digits, type, 32, false, false, false, run_shift}, PANEL + 3, 454);
                if (format != TABLE)
                    check_coded<T>(check, {format, digits, type, 32, false, true, false, run_shift}, PANEL - 1, 454);
            }
    for (int digits : {1, 2}) check_coded<T>(check, {BYTES, digits, FLOAT32, 0, false, false, false}, PANEL, 4100);
}

}  // namespace self_test
