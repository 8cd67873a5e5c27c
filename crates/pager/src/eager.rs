//! Filling before the guest starts: everything, or its working set.

use std::sync::Mutex;
use std::sync::PoisonError;

use afresh_sys::file::{self, MAX_PIECES, Piece};
use afresh_sys::{Advice, HUGE_PAGES, PAGE_SIZE, PageRange, Protection, Reservation};

use crate::{PageSource, RestoreError, SourceError};

/// Replaces `range` by anonymous memory and reads all of it.
pub(crate) fn read_all(
    target: &Reservation,
    range: PageRange,
    source: &dyn PageSource,
) -> Result<(), RestoreError> {
    target.map_anonymous(range, Protection::ReadWrite)?;
    // Huge pages are filled several times as fast, where the kernel has them.
    target.advise(range, Advice::HugePage)?;
    for first in (0..range.len).step_by(HUGE_PAGES) {
        let pages = HUGE_PAGES.min(range.len - first);
        // SAFETY: inside the range, which was just mapped writable and is not used until the
        // restore has started.
        let read = unsafe { source.read(first, target.page_ptr(range.start + first), pages) };
        close_on_error(target, range, read)?;
    }
    Ok(())
}

/// Reads the working set into `range`, which is fresh anonymous memory, with as many threads as
/// pay.
pub(crate) fn read_working_set(
    target: &Reservation,
    range: PageRange,
    source: &dyn PageSource,
) -> Result<(), RestoreError> {
    let mut set = source.working_set();
    let inside = PageRange::new(0, range.len);
    let fits = set.last().is_none_or(|run| run.end() <= range.len);
    let compact = source.working_set_file().filter(|_| fits);
    if compact.is_none() && fits {
        let read = source.read_working_set(&mut |run, bytes| {
            let room = range.len.saturating_sub(run.start).min(bytes.len() / PAGE_SIZE);
            if room > 0 {
                let to = target.page_ptr(range.start + run.start);
                // SAFETY: so many pages are inside the range, which is mapped writable and not used
                // yet.
                unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), room * PAGE_SIZE) };
            }
            Ok(())
        });
        return close_on_error(target, range, read);
    }
    set = set.iter().filter_map(|run| run.intersect(inside)).collect();
    let total: usize = set.iter().map(|run| run.len).sum();
    let threads = match std::thread::available_parallelism() {
        // A thread pays from about a millisecond of reading on.
        Ok(n) => n.get().min(4).min(total / 512).max(1),
        Err(_) => 1,
    };
    let shares = share(&set, total.div_ceil(threads).max(1));
    let failure: Mutex<Option<SourceError>> = Mutex::new(None);
    let read = |(runs, skip): &(Vec<PageRange>, usize)| {
        let result = match compact {
            Some((file, page)) => read_compact(target, range, file, page + skip, runs),
            None => runs.iter().try_for_each(|run| {
                // SAFETY: inside the range, which is mapped writable and not used yet.
                unsafe { source.read(run.start, target.page_ptr(range.start + run.start), run.len) }
            }),
        };
        if let Err(error) = result {
            *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
    };
    std::thread::scope(|scope| {
        if let Some((first, rest)) = shares.split_first() {
            rest.iter().for_each(|share| {
                scope.spawn(|| read(share));
            });
            read(first);
        }
    });
    let failure = failure.into_inner().unwrap_or_else(PoisonError::into_inner);
    close_on_error(target, range, failure.map_or(Ok(()), Err))
}

/// After an error part of the pages would read as zero, so access to all of them is taken away.
fn close_on_error(
    target: &Reservation,
    range: PageRange,
    result: Result<(), SourceError>,
) -> Result<(), RestoreError> {
    if result.is_err() {
        target.protect(range, Protection::None)?;
    }
    Ok(result?)
}

/// Splits runs into shares of at most `pages` pages, each with the number of pages before it.
fn share(set: &[PageRange], pages: usize) -> Vec<(Vec<PageRange>, usize)> {
    let mut shares: Vec<(Vec<PageRange>, usize)> = Vec::new();
    let (mut room, mut before) = (0, 0);
    for run in set {
        let mut run = *run;
        while run.len > 0 {
            if room == 0 {
                shares.push((Vec::new(), before));
                room = pages;
            }
            let len = run.len.min(room);
            if let Some((runs, _)) = shares.last_mut() {
                runs.push(PageRange::new(run.start, len));
            }
            run = PageRange::new(run.start + len, run.len - len);
            room -= len;
            before += len;
        }
    }
    shares
}

/// Reads consecutive pages of `file` into scattered runs, many runs a call.
fn read_compact(
    target: &Reservation,
    range: PageRange,
    file: std::os::fd::BorrowedFd<'_>,
    first_page: usize,
    runs: &[PageRange],
) -> Result<(), SourceError> {
    let mut offset = first_page * PAGE_SIZE;
    for batch in runs.chunks(MAX_PIECES) {
        let mut pieces: Vec<Piece> = batch
            .iter()
            .map(|run| Piece { to: target.page_ptr(range.start + run.start), len: run.byte_len() })
            .collect();
        let mut left = &mut pieces[..];
        while !left.is_empty() {
            // SAFETY: every piece is inside the range, which is mapped writable and not used yet.
            let mut done = unsafe { file::read_scattered(file, left, offset) }?;
            offset += done;
            // Drop what was read; a piece that was read in part stays with its rest.
            let mut whole = 0;
            while let Some(piece) = left.get(whole)
                && piece.len <= done
            {
                done -= piece.len;
                whole += 1;
            }
            left = &mut left[whole..];
            if let Some(piece) = left.first_mut() {
                // SAFETY: `done` is less than the piece's length.
                piece.to = unsafe { piece.to.add(done) };
                piece.len -= done;
            }
        }
    }
    Ok(())
}
