//! WASI preview 2: `wasi:filesystem`'s types and preopens are our own, over a guest's file tree or
//! host directories; all else is wasmtime-wasi's.
//!
//! Promises: as [`crate::host::preview1`]. Nothing of it waits but for the host's file system, so
//! the functions for guests that wait and for those that do not are the same, except `sync`. May
//! break it: a handle is a number in wasmtime-wasi's table with our value behind it; code that
//! reads the table directly would find it.

mod descriptor;
mod streams;

use wasmtime::component::{HasData, Linker, Resource, ResourceTable};
use wasmtime_wasi::p2::bindings::filesystem::{preopens, types};
use wasmtime_wasi::p2::bindings::sync::filesystem as sync;
use wasmtime_wasi::p2::bindings::{io, sync::io as sync_io};
use wasmtime_wasi::p2::{DynInputStream, DynOutputStream, FsError, FsResult};

use crate::host::Host;
use crate::host::files::LiveFiles;
use descriptor::Listing;

/// The parts of a store that calls on files use.
pub(crate) struct View<'a> {
    files: LiveFiles,
    table: &'a mut ResourceTable,
}

struct HasFiles;

impl HasData for HasFiles {
    type Data<'a> = View<'a>;
}

fn view(host: &mut Host) -> View<'_> {
    let files = host.live();
    View { files, table: host.table() }
}

struct HasTable;

impl HasData for HasTable {
    type Data<'a> = &'a mut ResourceTable;
}

/// Replaces the functions of `wasi:io` that need no context, because wasmtime-wasi builds a context
/// for each call.
pub(crate) fn link_io(linker: &mut Linker<Host>, waits: bool) -> wasmtime::Result<()> {
    io::error::add_to_linker::<Host, HasTable>(linker, Host::table)?;
    match waits {
        true => {
            io::poll::add_to_linker::<Host, HasTable>(linker, Host::table)?;
            io::streams::add_to_linker::<Host, HasTable>(linker, Host::table)?;
        }
        false => {
            sync_io::poll::add_to_linker::<Host, HasTable>(linker, Host::table)?;
            sync_io::streams::add_to_linker::<Host, HasTable>(linker, Host::table)?;
        }
    }
    crate::host::wait::link(linker, waits)
}

/// Replaces wasmtime-wasi's functions of files.
pub(crate) fn link(linker: &mut Linker<Host>, waits: bool) -> wasmtime::Result<()> {
    preopens::add_to_linker::<Host, HasFiles>(linker, view)?;
    match waits {
        true => types::add_to_linker::<Host, HasFiles>(linker, view),
        false => sync::types::add_to_linker::<Host, HasFiles>(linker, view),
    }
}

impl preopens::Host for View<'_> {
    fn get_directories(&mut self) -> wasmtime::Result<Vec<(Resource<types::Descriptor>, String)>> {
        self.directories()
    }
}

/// The result of the last write to a stream, as a code.
fn code_of(
    view: &View<'_>,
    error: &Resource<wasmtime::Error>,
) -> wasmtime::Result<Option<types::ErrorCode>> {
    let error = view.table.get(error)?;
    Ok(error.downcast_ref::<std::io::Error>().map(types::ErrorCode::from))
}

/// The traits for guests that wait, and for those that do not: the same, with types of the same
/// shape.
macro_rules! serve {
    ($types:path, $sync:ident $(, $wait:tt)?) => {
        const _: () = {
            use $types as given;
            type Fd = Resource<given::Descriptor>;

            impl given::Host for View<'_> {
                fn convert_error_code(&mut self, error: FsError) -> wasmtime::Result<given::ErrorCode> {
                    Ok(error.downcast()?.into())
                }

                fn filesystem_error_code(
                    &mut self,
                    error: Resource<wasmtime::Error>,
                ) -> wasmtime::Result<Option<given::ErrorCode>> {
                    Ok(code_of(self, &error)?.map(Into::into))
                }
            }

            impl given::HostDescriptor for View<'_> {
                $($wait)? fn advise(&mut self, fd: Fd, _: u64, _: u64, _: given::Advice) -> FsResult<()> {
                    self.file(&fd).map(drop)
                }
                $($wait)? fn sync_data(&mut self, fd: Fd) -> FsResult<()> {
                    $sync!(self, &fd, true)
                }
                $($wait)? fn get_flags(&mut self, fd: Fd) -> FsResult<given::DescriptorFlags> {
                    Ok(self.flags(&fd)?.into())
                }
                $($wait)? fn get_type(&mut self, fd: Fd) -> FsResult<given::DescriptorType> {
                    Ok(self.stat_of(&fd)?.type_.into())
                }
                $($wait)? fn set_size(&mut self, fd: Fd, size: u64) -> FsResult<()> {
                    self.resize(&fd, size)
                }
                $($wait)? fn set_times(
                    &mut self,
                    fd: Fd,
                    accessed: given::NewTimestamp,
                    modified: given::NewTimestamp,
                ) -> FsResult<()> {
                    self.set_times_of(&fd, None, accessed.into(), modified.into())
                }
                $($wait)? fn read(&mut self, fd: Fd, len: u64, at: u64) -> FsResult<(Vec<u8>, bool)> {
                    self.read_at(&fd, len, at)
                }
                $($wait)? fn write(&mut self, fd: Fd, bytes: Vec<u8>, at: u64) -> FsResult<u64> {
                    self.write_at(&fd, &bytes, at)
                }
                $($wait)? fn read_directory(
                    &mut self,
                    fd: Fd,
                ) -> FsResult<Resource<given::DirectoryEntryStream>> {
                    Ok(Resource::new_own(self.list(&fd)?.rep()))
                }
                $($wait)? fn sync(&mut self, fd: Fd) -> FsResult<()> {
                    $sync!(self, &fd, false)
                }
                $($wait)? fn create_directory_at(&mut self, fd: Fd, path: String) -> FsResult<()> {
                    self.make_directory(&fd, &path)
                }
                $($wait)? fn stat(&mut self, fd: Fd) -> FsResult<given::DescriptorStat> {
                    Ok(self.stat_of(&fd)?.into())
                }
                $($wait)? fn stat_at(
                    &mut self,
                    fd: Fd,
                    flags: given::PathFlags,
                    path: String,
                ) -> FsResult<given::DescriptorStat> {
                    Ok(self.stat_path(&fd, flags.into(), &path)?.into())
                }
                $($wait)? fn set_times_at(
                    &mut self,
                    fd: Fd,
                    flags: given::PathFlags,
                    path: String,
                    accessed: given::NewTimestamp,
                    modified: given::NewTimestamp,
                ) -> FsResult<()> {
                    let at = Some((flags.into(), &*path));
                    self.set_times_of(&fd, at, accessed.into(), modified.into())
                }
                $($wait)? fn link_at(
                    &mut self,
                    fd: Fd,
                    flags: given::PathFlags,
                    old: String,
                    into: Fd,
                    new: String,
                ) -> FsResult<()> {
                    self.link_path(&fd, flags.into(), &old, &into, &new)
                }
                $($wait)? fn open_at(
                    &mut self,
                    fd: Fd,
                    path_flags: given::PathFlags,
                    path: String,
                    how: given::OpenFlags,
                    flags: given::DescriptorFlags,
                ) -> FsResult<Fd> {
                    self.open_path(&fd, path_flags.into(), &path, how.into(), flags.into())
                }
                fn drop(&mut self, fd: Fd) -> wasmtime::Result<()> {
                    self.close(&fd)
                }
                $($wait)? fn readlink_at(&mut self, fd: Fd, path: String) -> FsResult<String> {
                    self.read_link(&fd, &path)
                }
                $($wait)? fn remove_directory_at(&mut self, fd: Fd, path: String) -> FsResult<()> {
                    self.remove_directory(&fd, &path)
                }
                $($wait)? fn rename_at(
                    &mut self,
                    fd: Fd,
                    old: String,
                    into: Fd,
                    new: String,
                ) -> FsResult<()> {
                    self.rename(&fd, &old, &into, &new)
                }
                $($wait)? fn symlink_at(&mut self, fd: Fd, target: String, path: String) -> FsResult<()> {
                    self.make_link(&fd, &target, &path)
                }
                $($wait)? fn unlink_file_at(&mut self, fd: Fd, path: String) -> FsResult<()> {
                    self.remove_file(&fd, &path)
                }
                fn read_via_stream(&mut self, fd: Fd, at: u64) -> FsResult<Resource<DynInputStream>> {
                    self.reader(&fd, at)
                }
                fn write_via_stream(&mut self, fd: Fd, at: u64) -> FsResult<Resource<DynOutputStream>> {
                    self.writer(&fd, Some(at))
                }
                fn append_via_stream(&mut self, fd: Fd) -> FsResult<Resource<DynOutputStream>> {
                    self.writer(&fd, None)
                }
                $($wait)? fn is_same_object(&mut self, a: Fd, b: Fd) -> wasmtime::Result<bool> {
                    self.is_same(&a, &b)
                }
                $($wait)? fn metadata_hash(&mut self, fd: Fd) -> FsResult<given::MetadataHashValue> {
                    Ok(self.hash(&fd, None)?.into())
                }
                $($wait)? fn metadata_hash_at(
                    &mut self,
                    fd: Fd,
                    flags: given::PathFlags,
                    path: String,
                ) -> FsResult<given::MetadataHashValue> {
                    Ok(self.hash(&fd, Some((flags.into(), &path)))?.into())
                }
            }

            impl given::HostDirectoryEntryStream for View<'_> {
                $($wait)? fn read_directory_entry(
                    &mut self,
                    stream: Resource<given::DirectoryEntryStream>,
                ) -> FsResult<Option<given::DirectoryEntry>> {
                    let listing = Resource::<Listing>::new_borrow(stream.rep());
                    Ok(self.table.get_mut(&listing)?.next_entry()?.map(Into::into))
                }
                fn drop(&mut self, stream: Resource<given::DirectoryEntryStream>) -> wasmtime::Result<()> {
                    self.table.delete(Resource::<Listing>::new_own(stream.rep()))?;
                    Ok(())
                }
            }
        };
    };
}

#[allow(clippy::useless_conversion, reason = "the types of one of the two are those of the other")]
mod waiting {
    use super::*;
    macro_rules! sync {
        ($view:expr, $fd:expr, $data:expr) => {
            match $view.host_file($fd)? {
                Some(file) => {
                    Ok(crate::host::wait::sync(file, $data).await.map_err(descriptor::refused)?)
                }
                None => Ok(()),
            }
        };
    }
    serve!(super::types, sync, async);
}
mod direct {
    use super::*;
    macro_rules! sync {
        ($view:expr, $fd:expr, $data:expr) => {
            match $view.host_file($fd)? {
                Some(file) => Ok(file.sync($data).map_err(descriptor::refused)?),
                None => Ok(()),
            }
        };
    }
    serve!(super::sync::types, sync);
}
