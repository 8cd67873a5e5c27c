//! The list of mappings that the kernel has of a guest process.

use super::Process;
use crate::platform::{PlatformError, stub};

impl Process {
    pub(in crate::platform) fn maps(&self) -> Result<String, PlatformError> {
        std::fs::read_to_string(format!("/proc/{}/maps", self.id()))
            .map_err(|e| PlatformError::kernel("reading the list of mappings", e))
    }

    /// The kernel's mappings of the guest: start, end, protection.
    ///
    /// Any other mapping must belong to the stub, or its entry appears as well.
    pub(crate) fn mappings(&self) -> Result<Vec<(u64, u64, u64)>, PlatformError> {
        let text = self.maps()?;
        let mut list = Vec::new();
        for line in text.lines() {
            let mut fields = line.split(' ');
            let range = fields.next().and_then(|range| range.split_once('-'));
            let address = |text| u64::from_str_radix(text, 16).ok();
            let Some((start, end)) = range.and_then(|(s, e)| address(s).zip(address(e))) else {
                continue;
            };
            let modes = fields.next().unwrap_or_default().as_bytes();
            let own = (stub::CODE..stub::CLOCK.end).contains(&start)
                || (stub::IMAGE..stub::ABOVE).contains(&start)
                || start >= stub::TOP;
            if !own {
                let bits =
                    [(b'r', libc::PROT_READ), (b'w', libc::PROT_WRITE), (b'x', libc::PROT_EXEC)];
                let held = bits.iter().filter(|(letter, _)| modes.contains(letter));
                list.push((start, end, held.fold(0, |all, (_, bit)| all | *bit as u64)));
            }
        }
        Ok(list)
    }
}
