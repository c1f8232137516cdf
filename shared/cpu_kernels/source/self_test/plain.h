// What each kernel should give, in plain loops and in double, and the numbers to try it on.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "../linear/linear.h"

namespace plain {

template <class T>
using Elements = std::vector<typename T::Element>;

struct Matrix {
    int64_t rows, columns;
    std::vector<double> values;

    Matrix(int64_t rows, int64_t columns)
        : rows(rows), columns(columns), values(rows * columns) {}
    double* operator[](int64_t row) { return values.data() + row * columns; }
    const double* operator[](int64_t row) const { return values.data() + row * columns; }
};

// The nearest number of the type, to even.
template <class T>
typename T::Element element(double x) {
    const float near = (float)x;
    if constexpr (T::PER_UNIT == 1) return near;
    uint32_t bits;
    std::memcpy(&bits, &near, 4);
    return (typename T::Element)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T>
Elements<T> elements(const Matrix& from) {
    Elements<T> to(from.values.size());
    std::transform(from.values.begin(), from.values.end(), to.begin(), element<T>);
    return to;
}

template <class T>
Matrix matrix(const Elements<T>& from, int64_t columns) {
    Matrix to((int64_t)from.size() / columns, columns);
    std::transform(from.begin(), from.end(), to.values.begin(), T::widen);
    return to;
}

// As if it had been written in the type.
template <class T>
Matrix rounded(const Matrix& from) {
    return matrix<T>(elements<T>(from), from.columns);
}

inline std::mt19937& numbers() {
    static std::mt19937 state;
    return state;
}

// Numbers of the type about zero, the same in every run and on every machine: sums of twelve even draws, whose
// deviation is one.
template <class T>
Matrix drawn(int64_t rows, int64_t columns, double deviation = 1) {
    Matrix to(rows, columns);
    for (double& value : to.values) {
        int64_t sum = 0;
        for (int i = 0; i < 12; i++) sum += numbers()() >> 16;
        value = ((double)sum / 65536 - 6) * deviation;
    }
    return rounded<T>(to);
}

inline double activate(int epilogue, double x) {
    switch (epilogue) {
        case tessera::GELU: return x * 0.5 * (1 + std::erf(x / std::sqrt(2.0)));
        case tessera::GELU_TANH:
            return x * 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
        case tessera::QUICK_GELU: return x / (1 + std::exp(-1.702 * x));
        default: return x;
    }
}

// x w^T + bias, [rows, w's rows]; for SWIGLU half as many columns.
inline Matrix linear(const Matrix& x, const Matrix& w, const double* bias, int epilogue) {
    Matrix sums(x.rows, w.rows);
    for (int64_t r = 0; r < x.rows; r++)
        for (int64_t c = 0; c < w.rows; c++) {
            double sum = bias ? bias[c] : 0;
            for (int64_t k = 0; k < w.columns; k++) sum += x[r][k] * w[c][k];
            sums[r][c] = activate(epilogue, sum);
        }
    if (epilogue != tessera::SWIGLU) return sums;
    Matrix gated(x.rows, w.rows / 2);
    for (int64_t r = 0; r < x.rows; r++)
        for (int64_t c = 0; c < gated.columns; c++) {
            const double gate = sums[r][c];
            gated[r][c] = gate / (1 + std::exp(-gate)) * sums[r][gated.columns + c];
        }
    return gated;
}

inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }

// x w^T in float32 in steps of 32 inputs, as `pairs.h` says: [x's rows, w's rows], one sum after the other.
template <class T>
std::vector<float> sums_in_steps(const Elements<T>& x, const Elements<T>& w, int64_t inputs) {
    std::vector<float> sums;
    for (size_t row = 0; row < x.size(); row += inputs)
        for (size_t column = 0; column < w.size(); column += inputs) {
            float sum = 0;
            for (int64_t first = 0; first < inputs; first += 32) {
                float chains[2] = {};
                for (int64_t k = first; k < std::min(inputs, first + 32); k++)
                    chains[k % 2] = flushed(std::fma(flushed(T::widen(w[column + k])),
                                                     flushed(T::widen(x[row + k])), chains[k % 2]));
                sum = flushed(sum + flushed(chains[0] + chains[1]));
            }
            sums.push_back(sum);
        }
    return sums;
}

// Rows over their root mean square, or over their deviation where there is a bias.
inline Matrix norm(const Matrix& x, const double* weight, const double* bias, double eps) {
    Matrix to(x.rows, x.columns);
    for (int64_t r = 0; r < x.rows; r++) {
        double mean = 0, squares = 0;
        for (int64_t d = 0; d < x.columns && bias; d++) mean += x[r][d] / (double)x.columns;
        for (int64_t d = 0; d < x.columns; d++) squares += (x[r][d] - mean) * (x[r][d] - mean);
        const double scale = 1 / std::sqrt(squares / (double)x.columns + eps);
        for (int64_t d = 0; d < x.columns; d++)
            to[r][d] = (x[r][d] - mean) * scale * weight[d] + (bias ? bias[d] : 0);
    }
    return to;
}

inline Matrix sum(Matrix a, const Matrix& b) {
    for (size_t i = 0; i < a.values.size(); i++) a.values[i] += b.values[i];
    return a;
}

// Rotates pairs (d, d + half a head) of every head; `cos` and `sin` have a row for each of x's, and
// sin's first half carries the minus sign.
inline Matrix rotated(const Matrix& x, const Matrix& cos, const Matrix& sin) {
    Matrix to(x.rows, x.columns);
    const int64_t size = cos.columns, half = size / 2;
    for (int64_t r = 0; r < x.rows; r++)
        for (int64_t c = 0; c < x.columns; c++) {
            const int64_t d = c % size, other = d < half ? c + half : c - half;
            to[r][c] = x[r][c] * cos[r][d] + x[r][other] * sin[r][d];
        }
    return to;
}

struct Attention {
    int64_t q_heads, heads, size;  // `heads`: of keys and values
    double scale, softcap = 0;     // softcap 0: none
    int64_t window = 0;            // 0: none
    const float* sinks = nullptr;  // [q heads]
};

// A query [q heads * size] at `position` over keys and values [tokens, heads * size], of which it
// sees those up to its own place, or the first `all`.
inline void attend(const Attention& call, const double* q, const Matrix& keys, const Matrix& values,
                   int64_t position, int64_t all, double* out) {
    const int64_t to = all ? all : position + 1;
    const int64_t from = call.window ? std::max<int64_t>(0, position + 1 - call.window) : 0;
    for (int64_t h = 0; h < call.q_heads; h++, q += call.size, out += call.size) {
        const int64_t column = h / (call.q_heads / call.heads) * call.size;
        std::vector<double> scores;
        for (int64_t t = from; t < to; t++) {
            double score = 0;
            for (int64_t d = 0; d < call.size; d++) score += q[d] * keys[t][column + d];
            score *= call.scale;
            if (call.softcap > 0) score = call.softcap * std::tanh(score / call.softcap);
            scores.push_back(score);
        }
        double total = call.sinks ? std::exp((double)call.sinks[h]) : 0;
        std::fill(out, out + call.size, 0.0);
        for (int64_t t = from; t < to; t++) {
            const double weight = std::exp(scores[t - from]);
            total += weight;
            for (int64_t d = 0; d < call.size; d++) out[d] += weight * values[t][column + d];
        }
        for (int64_t d = 0; d < call.size; d++) out[d] /= total;
    }
}

}  // namespace plain
