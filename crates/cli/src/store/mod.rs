//! Commands for existing snapshots. They parse options and print results; `afresh-store` and
//! `afresh-pager` do the work.

pub(crate) mod compact;
pub(crate) mod diff;
pub(crate) mod export;
pub(crate) mod gc;
pub(crate) mod import;
pub(crate) mod inspect;
pub(crate) mod list;
mod page_map;
pub(crate) mod pager;
pub(crate) mod tag;
pub(crate) mod transfer;

use afresh::store::Encoding;
use clap::ValueEnum;

/// Encoding of pages.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum EncodingArgument {
    /// Uncompressed, can be mapped.
    Raw,
    /// Compressed, smaller to transfer.
    Zstd,
}

impl From<EncodingArgument> for Encoding {
    fn from(argument: EncodingArgument) -> Self {
        match argument {
            EncodingArgument::Raw => Encoding::Raw,
            EncodingArgument::Zstd => Encoding::Zstd,
        }
    }
}

fn encoding_name(encoding: Encoding) -> &'static str {
    match encoding {
        Encoding::Raw => "raw",
        Encoding::Zstd => "zstd",
    }
}
