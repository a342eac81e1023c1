// Calls a function of a library of native code on a copy of a process's memory, which lies in a file, and writes the
// memory back: `caller LIBRARY FUNCTION FILE`.
//
// The file has int64 numbers: how many buffers and pointers there are, the buffers' sizes, and for each pointer the buffer
// and the offset where it is, and those that it points to. The buffers' bytes follow. The first has the argument.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

struct Pointer {
    int64_t buffer, offset, target, target_offset;
};

int main(int, char** arguments) {
    FILE* file = std::fopen(arguments[3], "r+b");
    const auto read = [&](void* to, size_t size) {
        if (size && std::fread(to, size, 1, file) != 1) std::exit(2);
    };
    int64_t counts[2];
    read(counts, sizeof counts);
    std::vector<int64_t> sizes(counts[0]);
    std::vector<Pointer> pointers(counts[1]);
    read(sizes.data(), sizes.size() * sizeof(int64_t));
    read(pointers.data(), pointers.size() * sizeof(Pointer));
    const long begin = std::ftell(file);
    std::vector<char*> buffers;
    for (const int64_t size : sizes) {
        buffers.push_back(static_cast<char*>(std::aligned_alloc(64, (size + 127) / 64 * 64)));
        read(buffers.back(), size);
    }
    for (const Pointer& pointer : pointers) {
        const char* target = buffers[pointer.target] + pointer.target_offset;
        std::memcpy(buffers[pointer.buffer] + pointer.offset, &target, sizeof target);
    }
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 4;
    }
    const auto function = reinterpret_cast<void (*)(void*)>(dlsym(library, arguments[2]));
    if (!function) return 5;
    function(buffers[0]);
    std::fseek(file, begin, SEEK_SET);
    for (size_t i = 0; i < buffers.size(); ++i)
        if (sizes[i] && std::fwrite(buffers[i], sizes[i], 1, file) != 1) return 3;
    return std::fclose(file);
}
