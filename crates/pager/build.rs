//! `AFRESH_PORTABLE=1` builds the portable backend on Linux, to test it: docs/platforms.md.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(afresh_portable)");
    println!("cargo::rerun-if-env-changed=AFRESH_PORTABLE");
    if std::env::var_os("AFRESH_PORTABLE").is_some_and(|set| set == "1") {
        println!("cargo::rustc-cfg=afresh_portable");
    }
}
