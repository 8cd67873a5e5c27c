//! Numbers of recent calls that `libc` lacks, at least for one processor. From 424 on, all
//! processors have the same.

#![allow(non_upper_case_globals, reason = "names as in `libc`")]

use libc::c_long;

pub(crate) const SYS_cachestat: c_long = 451;
pub(crate) const SYS_fchmodat2: c_long = 452;
pub(crate) const SYS_statmount: c_long = 457;
pub(crate) const SYS_listmount: c_long = 458;
pub(crate) const SYS_lsm_get_self_attr: c_long = 459;
pub(crate) const SYS_lsm_set_self_attr: c_long = 460;
pub(crate) const SYS_lsm_list_modules: c_long = 461;
pub(crate) const SYS_file_getattr: c_long = 468;
pub(crate) const SYS_file_setattr: c_long = 469;
