//! The files of process 1 in `/proc`: the process that adopts orphans and that no guest runs.
//!
//! Promises: its parent is 0, it leads its own group and session, and it belongs to no user of the
//! guest. It is in no list of processes.

/// The text of a file of `/proc/1`.
pub(in crate::sentry) fn init_text(names: &[&[u8]]) -> Option<Vec<u8>> {
    let text = match names {
        [b"comm"] => "init\n".to_owned(),
        [b"cmdline"] => String::new(),
        [b"stat"] => format!("1 (init) S 0 1 1 0 -1{} 20 0 1{}\n", " 0".repeat(9), " 0".repeat(32)),
        [b"status"] => "Name:\tinit\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t1\nNgid:\t0\n\
             Pid:\t1\nPPid:\t0\nTracerPid:\t0\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nThreads:\t1\n"
            .to_owned(),
        _ => return None,
    };
    Some(text.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_process_1_has_all_its_fields() {
        let line = String::from_utf8(init_text(&[b"stat"]).unwrap()).unwrap();
        let fields: Vec<_> = line.split_whitespace().collect();
        assert_eq!((fields.len(), &fields[3..6]), (52, &["0", "1", "1"][..]));
        assert_eq!((fields[17], fields[18], fields[19]), ("20", "0", "1"));
    }
}
