// What tests have in the place of cuBLASLt: the functions of it that are used, on the host, by its documentation and
// not by what calls them. Matrices lie column by column; what is asked for that is not here is refused.
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {
enum { OK = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_16BF = 14, COMPUTE_32F = 68, MAX_WORKSPACE = 1, TRANSA = 3, TRANSB = 4 };
const uint64_t ALGORITHM = 0x6d6f65;

struct Desc { int transposed[2]; };
struct Layout { int type; uint64_t rows, columns; int64_t stride; };
struct Preference { size_t workspace; };
struct Found { uint64_t algorithm[8]; size_t workspace; int status; float waves; int reserved[4]; };

float bits(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
float get(const void* p, const Layout& l, uint64_t row, uint64_t column) {
    uint64_t at = row + column * l.stride;
    return l.type == R_32F ? ((const float*)p)[at] : bits((uint32_t)((const uint16_t*)p)[at] << 16);
}
void put(void* p, const Layout& l, uint64_t row, uint64_t column, float x) {
    uint64_t at = row + column * l.stride;
    if (l.type == R_32F) { ((float*)p)[at] = x; return; }
    uint32_t word;
    memcpy(&word, &x, 4);
    bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    ((uint16_t*)p)[at] = is_nan ? (uint16_t)((word >> 16) | 0x40) : (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}
// Rows and columns of what is multiplied.
uint64_t rows_of(const Layout& l, int transposed) { return transposed ? l.columns : l.rows; }
uint64_t columns_of(const Layout& l, int transposed) { return transposed ? l.rows : l.columns; }

bool fit(const Desc& desc, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
    bool types = a.type == R_16BF && b.type == R_16BF && c.type == d.type;
    bool depths = columns_of(a, desc.transposed[0]) == rows_of(b, desc.transposed[1]);
    bool results = rows_of(a, desc.transposed[0]) == d.rows && columns_of(b, desc.transposed[1]) == d.columns;
    bool strides = a.stride >= (int64_t)a.rows && b.stride >= (int64_t)b.rows && d.stride >= (int64_t)d.rows;
    return types && depths && results && strides && c.rows == d.rows && c.columns == d.columns;
}
}  // namespace

extern "C" {
size_t cublasLtGetCudartVersion() { return 12000; }
int cublasLtCreate(void** handle) { *handle = new int(1); return OK; }
int cublasLtMatmulDescCreate(void** desc, int compute, int scale) {
    if (compute != COMPUTE_32F || scale != R_32F) return NOT_SUPPORTED;
    *desc = new Desc();
    return OK;
}
int cublasLtMatmulDescSetAttribute(void* desc, int attribute, const void* value, size_t size) {
    if (size != 4 || (attribute != TRANSA && attribute != TRANSB)) return INVALID_VALUE;
    ((Desc*)desc)->transposed[attribute == TRANSB] = *(const int*)value;
    return OK;
}
int cublasLtMatmulDescDestroy(void* desc) { delete (Desc*)desc; return OK; }
int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    if (type != R_32F && type != R_16BF) return NOT_SUPPORTED;
    *layout = new Layout{type, rows, columns, stride};
    return OK;
}
int cublasLtMatrixLayoutDestroy(void* layout) { delete (Layout*)layout; return OK; }
int cublasLtMatmulPreferenceCreate(void** preference) { *preference = new Preference(); return OK; }
int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value, size_t size) {
    if (attribute != MAX_WORKSPACE || size != 8) return INVALID_VALUE;
    memcpy(&((Preference*)preference)->workspace, value, 8);
    return OK;
}
int cublasLtMatmulPreferenceDestroy(void* preference) { delete (Preference*)preference; return OK; }
int cublasLtMatmulAlgoGetHeuristic(void*, void* desc, void* a, void* b, void* c, void* d, void* preference, int wanted, Found* found, int* count) {
    *count = 0;
    if (!fit(*(Desc*)desc, *(Layout*)a, *(Layout*)b, *(Layout*)c, *(Layout*)d) || wanted < 1) return INVALID_VALUE;
    *found = Found{{ALGORITHM}, ((Preference*)preference)->workspace, OK, 1.0f, {}};
    *count = 1;
    return OK;
}
int cublasLtMatmul(void*, void* desc, const float* alpha, const void* a, void* of_a, const void* b, void* of_b, const float* beta, const void* c,
                   void* of_c, void* d, void* of_d, const uint64_t* algorithm, void* workspace, size_t workspace_bytes, void*) {
    const Desc& how = *(Desc*)desc;
    const Layout &la = *(Layout*)of_a, &lb = *(Layout*)of_b, &lc = *(Layout*)of_c, &ld = *(Layout*)of_d;
    if (!fit(how, la, lb, lc, ld) || algorithm[0] != ALGORITHM) return INVALID_VALUE;
    memset(workspace, 0xff, workspace_bytes < 4096 ? workspace_bytes : 4096);
    uint64_t depth = columns_of(la, how.transposed[0]);
    for (uint64_t column = 0; column < ld.columns; column++)
        for (uint64_t row = 0; row < ld.rows; row++) {
            float sum = 0.0f;
            for (uint64_t k = 0; k < depth; k++) {
                float x = how.transposed[0] ? get(a, la, k, row) : get(a, la, row, k);
                float y = how.transposed[1] ? get(b, lb, column, k) : get(b, lb, k, column);
                sum += x * y;
            }
            sum *= *alpha;
            // What is not asked for is not read.
            if (*beta != 0.0f) sum += *beta * get(c, lc, row, column);
            put(d, ld, row, column, sum);
        }
    return OK;
}
}
