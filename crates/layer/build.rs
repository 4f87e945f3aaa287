//! Link arguments of `libebb.so`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for argument in ["-Wl,-soname,libebb.so", "-Wl,-z,nodelete", "-Wl,-Bsymbolic"] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
}
