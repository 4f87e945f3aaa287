//! Makes the library what programs look for: the driver's name inside, its own symbols bound to itself (a preloaded
//! library must not come between `cuGetProcAddress` and the functions it answers with), never unloaded (it has threads).

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for argument in ["-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", "-Wl,-z,nodelete"] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
}
