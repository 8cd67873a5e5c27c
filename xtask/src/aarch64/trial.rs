//! A trial of the archive of the command in the machine.

use std::path::Path;

use anyhow::{Result, ensure};

use super::cross::Pages;
use super::machine::Machine;
use crate::guests;

/// Runs the command as a user would: a Wasm guest, a snapshot of it, a request over HTTP, a Linux
/// program, and a micro-VM, which is refused. The archive has the command in a folder of its name.
const SCRIPT: &str = r#"
check() {
    name=$1 expected=$2
    shift 2
    output=$("$@" 2>&1 </dev/null)
    case $output in
        *"$expected"*) echo "== passed $name" ;;
        *) echo "== failed $name: $output" ;;
    esac
}
show() {
    echo "== output of $*"
    "$@" 2>&1
}
cd /tmp
tar -xzf /trial/archive.tar.gz
export PATH=/bin:$(echo /tmp/afresh-cli-*)
js=/trial/js.wasm
show afresh doctor
check --version "afresh $(cat /trial/version)" afresh --version
check doctor "micro-VMs on x86_64 Linux only, and this is aarch64" afresh doctor
check run '"pristine":true' \
    afresh run $js --warm warm --call handle --input '{"op":"probe"}' -n 2
check snapshot "saved /tmp/store@js" afresh snapshot $js --warm warm --to /tmp/store@js
check "run of the snapshot" '"pristine":true' \
    afresh run /tmp/store@js --call handle --input '{"op":"probe"}' -n 2
afresh serve --addr 127.0.0.1:8973 /tmp/store@js >/tmp/serve 2>&1 &
server=$!
for attempt in 1 2 3 4 5 6 7 8 9 10 11 12; do
    grep -q 8973 /tmp/serve && break
    sleep 5
done
check serve '"pristine":true' \
    wget -qO- --post-data '{"op":"probe"}' http://127.0.0.1:8973/
kill $server
check exec "hi from a guest" afresh exec -- /bin/busybox echo hi from a guest
check "run of a micro-VM" "afresh runs micro-VMs on x86_64 Linux only, and this is aarch64" \
    afresh run /trial/machine
echo "== all ended"
"#;

/// The checks in [`SCRIPT`].
const CHECKS: usize = 8;

/// Tries an archive of the command; returns what was run.
pub(crate) fn try_archive(archive: &Path) -> Result<String> {
    let guest = guests::named("js")?;
    guests::build(guest)?;
    let mut machine = Machine::new(Pages::Small)?;
    machine.add_file(archive, Path::new("/trial/archive.tar.gz"))?;
    machine.add_file(&guests::path(guest), Path::new("/trial/js.wasm"))?;
    // An executable without a dynamic loader.
    machine.add(Path::new("/trial/machine"), &[b"\x7fELF".as_slice(), &[0; 60]].concat())?;
    machine.add(Path::new("/trial/version"), env!("CARGO_PKG_VERSION").as_bytes())?;
    let (mut passed, mut all, mut failures) = (Vec::new(), false, Vec::new());
    machine.boot(SCRIPT, |line| {
        all |= line == "== all ended";
        passed.extend(line.strip_prefix("== passed ").map(str::to_owned));
        failures.extend(line.strip_prefix("== failed ").map(str::to_owned));
        true
    })?;
    ensure!(failures.is_empty(), "on arm64 the command fails: {}", failures.join("; "));
    ensure!(all && passed.len() == CHECKS, "the machine ended after {}", passed.join(", "));
    Ok(format!("in the emulated machine: `tar -x`, {}", passed.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_checks_is_that_of_the_script() {
        let checks = SCRIPT.lines().filter(|line| line.starts_with("check ")).count();
        assert_eq!(checks, CHECKS);
    }
}
