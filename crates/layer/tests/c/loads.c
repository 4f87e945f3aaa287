// Loads the library that it is told of.
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char **words)
{
    void *library = count > 1 ? dlopen(words[1], RTLD_NOW) : NULL;
    if (!library) return 1;
    printf("closed %d\n", dlclose(library));
    return 0;
}
