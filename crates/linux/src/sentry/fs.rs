//! Files that the file tree does not hold: devices, `/proc`, and the root that a guest starts with.

pub(super) mod access_lists;
pub(super) mod devices;
pub(super) mod directory_paths;
mod init_process;
pub(super) mod ipc_files;
mod key_files;
pub(super) mod machine_files;
pub(super) mod mounts;
mod net_files;
mod page_map;
pub(super) mod permissions;
pub(super) mod proc_dir;
pub(super) mod proc_files;
pub(super) mod proc_maps;
pub(super) mod proc_paths;
pub(super) mod proc_settings;
mod proc_writes;
pub(super) mod procfs;
pub(super) mod root_files;
pub(super) mod seals;
pub(super) mod special_files;
