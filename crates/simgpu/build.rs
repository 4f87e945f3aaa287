//! Makes the library what programs look for: the driver's name inside, its own symbols bound to itself (a preloaded
//! library must not come between `cuGetProcAddress` and the functions it answers with), never unloaded (it has threads).

/// Threads that begin while a constructor of the program holds the loader's lock, as the real driver's do: without this
/// function `std` does not ask for that lock.
const NO_LOADER_LOCK: &str = "-Wl,--defsym=__cxa_thread_atexit_impl=0";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for argument in [
        "-Wl,-soname,libcuda.so.1",
        "-Wl,-Bsymbolic",
        "-Wl,-z,nodelete",
        NO_LOADER_LOCK,
    ] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
}
