//! Numbers of `ioctl(2)` requests. They are those of the kernel; the type of `libc`'s differs
//! between C libraries.

pub(crate) const TCGETS: u64 = 0x5401;
pub(crate) const TCSETS: u64 = 0x5402;
pub(crate) const TCSETSW: u64 = 0x5403;
pub(crate) const TCSETSF: u64 = 0x5404;
pub(crate) const TCGETA: u64 = 0x5405;
pub(crate) const TCSBRK: u64 = 0x5409;
pub(crate) const TCXONC: u64 = 0x540a;
pub(crate) const TCFLSH: u64 = 0x540b;
pub(crate) const TIOCEXCL: u64 = 0x540c;
pub(crate) const TIOCNXCL: u64 = 0x540d;
pub(crate) const TIOCSCTTY: u64 = 0x540e;
pub(crate) const TIOCGPGRP: u64 = 0x540f;
pub(crate) const TIOCSPGRP: u64 = 0x5410;
pub(crate) const TIOCOUTQ: u64 = 0x5411;
pub(crate) const TIOCSTI: u64 = 0x5412;
pub(crate) const TIOCGWINSZ: u64 = 0x5413;
pub(crate) const TIOCSWINSZ: u64 = 0x5414;
pub(crate) const FIONREAD: u64 = 0x541b;
pub(crate) const TIOCPKT: u64 = 0x5420;
pub(crate) const FIONBIO: u64 = 0x5421;
pub(crate) const TIOCNOTTY: u64 = 0x5422;
pub(crate) const TIOCSETD: u64 = 0x5423;
pub(crate) const TIOCGETD: u64 = 0x5424;
pub(crate) const TCSBRKP: u64 = 0x5425;
pub(crate) const TIOCGSID: u64 = 0x5429;
pub(crate) const TIOCGPTPEER: u64 = 0x5441;
pub(crate) const FIONCLEX: u64 = 0x5450;
pub(crate) const FIOCLEX: u64 = 0x5451;
pub(crate) const FIOASYNC: u64 = 0x5452;
pub(crate) const FIOSETOWN: u64 = 0x8901;
pub(crate) const SIOCSPGRP: u64 = 0x8902;
pub(crate) const FIOGETOWN: u64 = 0x8903;
pub(crate) const SIOCGPGRP: u64 = 0x8904;
pub(crate) const SIOCATMARK: u64 = 0x8905;
/// The kind of a namespace, and user namespaces that are related to it.
pub(crate) const NS_GET_USERNS: u64 = 0xb701;
pub(crate) const NS_GET_PARENT: u64 = 0xb702;
pub(crate) const NS_GET_NSTYPE: u64 = 0xb703;
pub(crate) const NS_GET_OWNER_UID: u64 = 0xb704;
/// The bits of the generator of random numbers.
pub(crate) const RNDGETENTCNT: u64 = 0x8004_5200;
pub(crate) const TIOCSPTLCK: u64 = 0x4004_5431;
pub(crate) const TIOCGPTN: u64 = 0x8004_5430;
/// Queries a mapping of an open `/proc/<process>/maps`.
pub(crate) const PROCMAP_QUERY: u64 = 0xc068_6611;
