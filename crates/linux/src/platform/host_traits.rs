//! Properties of this host's kernel and processor that a guest depends on: its clock code, and the form of its signal frames.
//!
//! A frozen guest has addresses within the kernel's vDSO in its memory, and the processor's whole state in its signal frame. So
//! it runs only where both are the same.

use serde::{Deserialize, Serialize};

/// Properties that must be equal where a frozen guest is thawed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostTraits {
    /// blake3 of the vDSO; zeros without one.
    clock: [u8; 32],
    /// Bytes that a signal frame takes.
    frame: u64,
}

/// Longest vDSO.
const MAX_VDSO_SIZE: usize = 64 << 10;

impl HostTraits {
    /// The properties of this host.
    pub(crate) fn here() -> Self {
        let clock = std::fs::read_to_string("/proc/self/maps").ok().and_then(|list| clock(&list));
        Self { clock: clock.unwrap_or_default(), frame: rustix::param::linux_minsigstksz() as u64 }
    }

    /// The first property that differs on this host, if any.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let here = Self::here();
        if self.frame != here.frame {
            return Err("the processor's state (the size of a signal frame)");
        }
        if self.clock != here.clock {
            return Err("the kernel's clock code (its vDSO)");
        }
        Ok(())
    }
}

/// The digest of this process's vDSO, and of the position of its data.
fn clock(list: &str) -> Option<[u8; 32]> {
    let mut hasher = blake3::Hasher::new();
    let mut found = None;
    let mut first = None;
    for line in list.lines() {
        let name = line.rsplit(' ').next().unwrap_or_default();
        if name != "[vdso]" && !name.starts_with("[vvar") {
            continue;
        }
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        let start = u64::from_str_radix(start, 16).ok()?;
        let end = u64::from_str_radix(end, 16).ok()?;
        let from = *first.get_or_insert(start);
        hasher.update(&(start - from).to_le_bytes()).update(&(end - start).to_le_bytes());
        if name == "[vdso]" {
            found = Some((start, (end - start) as usize));
        }
    }
    let (start, len) = found.filter(|(_, len)| *len <= MAX_VDSO_SIZE)?;
    let mut bytes = vec![0; len];
    let memory = std::fs::File::open("/proc/self/mem").ok()?;
    std::os::unix::fs::FileExt::read_exact_at(&memory, &mut bytes, start).ok()?;
    hasher.update(&bytes);
    Some(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_kernel_or_processor_is_named() {
        let here = HostTraits::here();
        assert_eq!(here.check(), Ok(()));
        assert_eq!(here, HostTraits::here());
        let frame = here.frame + 64;
        assert!(HostTraits { frame, ..here.clone() }.check().unwrap_err().contains("processor"));
        let clock = [1; 32];
        assert!(HostTraits { clock, ..here }.check().unwrap_err().contains("kernel"));
    }
}
