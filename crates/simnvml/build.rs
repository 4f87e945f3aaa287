//! Makes the library what programs look for: NVML's name inside, its own symbols bound to itself.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for argument in [
        "-Wl,-soname,libnvidia-ml.so.1",
        "-Wl,-Bsymbolic",
        "-Wl,-z,nodelete",
    ] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
}
