//! Set-up and checks for this repository: `cargo xtask demo` and `cargo xtask test`.

fn main() {}
