//! Devices that every guest has. The file tree keeps their numbers; what they do is decided where bytes move.

/// A character device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    Null,
    Zero,
    Random,
}

/// Names and numbers, as Linux has them.
pub(crate) const DEVICES: [(&str, Device, u64); 4] = [
    ("/dev/null", Device::Null, 0x103),
    ("/dev/zero", Device::Zero, 0x105),
    ("/dev/random", Device::Random, 0x108),
    ("/dev/urandom", Device::Random, 0x109),
];

impl Device {
    /// The device of this number, if guests have it.
    pub(crate) fn of(number: u64) -> Option<Self> {
        DEVICES.iter().find(|(_, _, known)| *known == number).map(|(_, device, _)| *device)
    }
}
