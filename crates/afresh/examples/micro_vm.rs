//! A micro-VM: native code behind a hardware boundary, pristine for every call.
//!
//! `cargo run -p afresh --features vm --example micro_vm -- GUEST INPUT`, where GUEST is a
//! static-PIE ELF built with one of the guest kits, such as the `hash` sample.

use std::path::Path;

use afresh::{Call, Options};

/// Calls the guest twice, and proves that the second call started where the first did.
pub(crate) fn call(guest: &Path, input: &[u8]) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    let options = Options::new()
        .memory(32 << 20)
        .timeout(std::time::Duration::from_secs(10))
        .vm(|builder| builder.log(|level, text| eprintln!("guest[{level}]: {text}")));
    let guest = afresh::open(guest.display().to_string(), &options)?;
    let first = guest.call("run", input)?;
    let second = guest.call("run", input)?;
    if first != second {
        return Err("two calls from one state answered differently".into());
    }
    let found = guest.verify(&Call::bytes("run", input), 3, &mut |_| {})?;
    if !found.is_pristine() {
        return Err(format!("something of a call was left: {found:?}").into());
    }
    Ok(first)
}

#[allow(dead_code, reason = "the tests call what it calls")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(guest), Some(input)) = (arguments.next(), arguments.next()) else {
        return Err("usage: micro_vm GUEST INPUT".into());
    };
    let answer = call(Path::new(&guest), input.as_encoded_bytes())?;
    println!("{}", String::from_utf8_lossy(&answer));
    Ok(())
}
