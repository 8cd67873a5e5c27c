//! The line discipline: editing of lines, bytes that are signals, and processing of output.
//!
//! As in Linux (`N_TTY`), without delays, upper case and printed erasure, which no terminal of
//! today needs.

use crate::sentry::kernel::signals::bit;
use crate::sentry::tty::terminals::{MAX_UNREAD_OUTPUT, TYPED, Terminal, Termios};

/// Maximum bytes that one byte of output becomes.
const MAX_EXPANSION: usize = 8;

// Packet bytes for a master in packet mode (`TIOCPKT_…`).
const FLUSH_READ: u8 = 1;
const FLUSH_WRITE: u8 = 2;
const STOP: u8 = 4;
const START: u8 = 8;
const NO_STOP: u8 = 16;
const DO_STOP: u8 = 32;

/// Whether a byte continues a character of UTF-8.
fn continues(byte: u8) -> bool {
    byte & 0xc0 == 0x80
}

impl Termios {
    fn has_input(&self, flag: u32) -> bool {
        self.input & flag != 0
    }

    fn has_output(&self, flag: u32) -> bool {
        self.output & flag != 0
    }

    pub(in crate::sentry) fn has_local(&self, flag: u32) -> bool {
        self.local & flag != 0
    }

    /// Whether a byte is this control character; 0 disables it.
    fn is(&self, byte: u8, what: usize) -> bool {
        byte != 0 && self.chars[what] == byte
    }

    /// Whether output stops and continues at the usual bytes.
    fn flows(&self) -> bool {
        let (stop, start) = (self.chars[libc::VSTOP], self.chars[libc::VSTART]);
        self.has_input(libc::IXON) && (stop, start) == (19, 17)
    }
}

impl Terminal {
    /// Takes a byte that is typed, for which there is room. The signal that it is, if it is one.
    pub(in crate::sentry) fn type_in(&mut self, mut byte: u8) -> Option<i32> {
        self.edges += 1;
        if self.termios.has_input(libc::ISTRIP) {
            byte &= 0x7f;
        }
        if std::mem::take(&mut self.literal) {
            self.keep(byte);
            return None;
        }
        if self.termios.has_input(libc::IXON) {
            match byte {
                byte if self.termios.is(byte, libc::VSTART) => {
                    self.flow(true);
                    return None;
                }
                byte if self.termios.is(byte, libc::VSTOP) => {
                    self.flow(false);
                    return None;
                }
                _ if self.termios.has_input(libc::IXANY) => self.flow(true),
                _ => {}
            }
        }
        if self.termios.has_local(libc::ISIG)
            && let Some(signal) = self.signal(byte)
        {
            if !self.termios.has_local(libc::NOFLSH) {
                self.flush_typed();
                self.flush_shown();
            }
            if self.termios.has_input(libc::IXON) {
                self.flow(true);
            }
            self.echo(byte);
            return Some(signal);
        }
        match byte {
            b'\r' if self.termios.has_input(libc::IGNCR) => return None,
            b'\r' if self.termios.has_input(libc::ICRNL) => byte = b'\n',
            b'\n' if self.termios.has_input(libc::INLCR) => byte = b'\r',
            _ => {}
        }
        if !self.termios.is_canonical() || !self.edit(byte) {
            self.keep(byte);
        }
        None
    }

    fn signal(&self, byte: u8) -> Option<i32> {
        let signals = [
            (libc::VINTR, libc::SIGINT),
            (libc::VQUIT, libc::SIGQUIT),
            (libc::VSUSP, libc::SIGTSTP),
        ];
        signals.iter().find(|(what, _)| self.termios.is(byte, *what)).map(|(_, signal)| *signal)
    }

    /// Handles a control character; returns whether it was one.
    fn edit(&mut self, byte: u8) -> bool {
        let termios = &self.termios;
        let (is, extended) = (|what| termios.is(byte, what), termios.has_local(libc::IEXTEN));
        let echoes = termios.has_local(libc::ECHO);
        if is(libc::VERASE) {
            self.erase(byte, |_| false);
        } else if is(libc::VWERASE) && extended {
            let mut seen = false;
            self.erase(byte, |next| {
                let word = next.is_ascii_alphanumeric() || next == b'_' || next >= 0x80;
                let more = word || !seen;
                seen |= word;
                more
            });
        } else if is(libc::VKILL) {
            self.kill(byte);
        } else if is(libc::VLNEXT) && extended {
            self.literal = true;
            if echoes && termios.has_local(libc::ECHOCTL) {
                self.show_all(b"^\x08");
            }
        } else if is(libc::VREPRINT) && echoes && extended {
            self.echo(byte);
            self.show(b'\n');
            self.line.clone().into_iter().for_each(|byte| self.echo(byte));
        } else if byte == b'\n' {
            if echoes || termios.has_local(libc::ECHONL) {
                self.show(byte);
            }
            self.end_line(Some(byte));
        } else if is(libc::VEOF) {
            self.end_line(None);
        } else if is(libc::VEOL) || is(libc::VEOL2) && extended {
            self.echo(byte);
            self.end_line(Some(byte));
        } else {
            return false;
        }
        true
    }

    fn end_line(&mut self, end: Option<u8>) {
        let mut line = std::mem::take(&mut self.line);
        line.extend(end);
        self.lines.push_back(line);
    }

    /// Keeps a byte that means itself.
    fn keep(&mut self, byte: u8) {
        let canonical = self.termios.is_canonical();
        // One less, for the end of a line.
        if self.readable() + self.lines.len() + self.line.len() + 1
            >= TYPED + usize::from(!canonical)
        {
            if self.termios.has_input(libc::IMAXBEL) {
                self.show(7);
            }
            return;
        }
        if self.line.is_empty() {
            self.begun = self.column;
        }
        self.echo(byte);
        match canonical {
            true => self.line.push(byte),
            false => match self.lines.back_mut() {
                Some(all) => all.push(byte),
                None => self.lines.push_back(vec![byte]),
            },
        }
    }

    /// Erases the last character, and earlier ones while `more` returns true.
    fn erase(&mut self, byte: u8, mut more: impl FnMut(u8) -> bool) {
        let whole = self.termios.has_input(libc::IUTF8);
        let mut first = true;
        while let Some(&last) = self.line.last() {
            if !more(last) && !first {
                return;
            }
            let wide = self.width();
            self.line.pop();
            if whole && continues(last) {
                while self.line.pop_if(|byte| continues(*byte)).is_some() {}
                self.line.pop_if(|byte| *byte >= 0xc0);
            }
            if self.termios.has_local(libc::ECHO) {
                match self.termios.has_local(libc::ECHOE) {
                    true => (0..wide).for_each(|_| self.show_all(b"\x08 \x08")),
                    false if first => self.echo(byte),
                    false => {}
                }
            }
            first = false;
        }
    }

    /// Columns that the last character of the line takes.
    fn width(&self) -> u32 {
        let control = self.termios.has_local(libc::ECHOCTL);
        let whole = self.termios.has_input(libc::IUTF8);
        let step = |column: u32, byte: u8| match byte {
            b'\t' => 8 - column % 8,
            0..32 | 127 => {
                if control {
                    2
                } else {
                    0
                }
            }
            byte if whole && continues(byte) => 0,
            _ => 1,
        };
        let mut last = 0;
        self.line.iter().fold(self.begun, |column, &byte| {
            let wide = step(column, byte);
            last = if whole && continues(byte) { last } else { wide };
            column.wrapping_add(wide)
        });
        last
    }

    /// Forgets the line.
    fn kill(&mut self, byte: u8) {
        let has = |flag| self.termios.has_local(flag);
        if has(libc::ECHO) && has(libc::ECHOK) && has(libc::ECHOKE) && has(libc::ECHOE) {
            self.erase(byte, |_| true);
            return;
        }
        let (echoes, breaks) = (has(libc::ECHO), has(libc::ECHOK));
        self.line.clear();
        if echoes {
            self.echo(byte);
            if breaks {
                self.show(b'\n');
            }
        }
    }

    /// Shows a byte that was typed, if such are shown.
    fn echo(&mut self, byte: u8) {
        if !self.termios.has_local(libc::ECHO) {
            return;
        }
        let plain = matches!(byte, b'\t' | b'\n' | 32..=126 | 128..);
        match plain || !self.termios.has_local(libc::ECHOCTL) {
            true => self.show(byte),
            false => self.show_all(&[b'^', byte ^ 0x40]),
        }
    }

    fn show_all(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.show(*byte));
    }

    /// Whether a byte of output finds room.
    pub(in crate::sentry) fn has_room(&self) -> bool {
        !self.stopped && self.shown.len() + MAX_EXPANSION <= MAX_UNREAD_OUTPUT
    }

    /// A byte of output, or an echo, which is lost without a reader.
    pub(in crate::sentry) fn show(&mut self, byte: u8) {
        if self.shown.len() + MAX_EXPANSION > MAX_UNREAD_OUTPUT {
            return;
        }
        self.edges += 1;
        let termios = &self.termios;
        if !termios.has_output(libc::OPOST) {
            self.shown.push_back(byte);
            return;
        }
        match byte {
            b'\n' => {
                if termios.has_output(libc::ONLCR) {
                    self.shown.push_back(b'\r');
                    self.column = 0;
                } else if termios.has_output(libc::ONLRET) {
                    self.column = 0;
                }
                self.shown.push_back(b'\n');
            }
            b'\r' if termios.has_output(libc::ONOCR) && self.column == 0 => {}
            b'\r' if termios.has_output(libc::OCRNL) => self.shown.push_back(b'\n'),
            b'\r' => {
                self.column = 0;
                self.shown.push_back(b'\r');
            }
            b'\t' => {
                let wide = 8 - self.column % 8;
                self.column = self.column.wrapping_add(wide);
                match termios.output & libc::TABDLY == libc::XTABS {
                    true => self.shown.extend((0..wide).map(|_| b' ')),
                    false => self.shown.push_back(b'\t'),
                }
            }
            8 => {
                self.column = self.column.saturating_sub(1);
                self.shown.push_back(8);
            }
            byte => {
                let seen = byte >= 32 && byte != 127;
                if seen && !(termios.has_input(libc::IUTF8) && continues(byte)) {
                    self.column = self.column.wrapping_add(1);
                }
                self.shown.push_back(byte);
            }
        }
    }

    /// Stops output, or continues it.
    pub(in crate::sentry) fn flow(&mut self, on: bool) {
        if self.stopped != on {
            return;
        }
        self.stopped = !on;
        self.edges += 1;
        let (set, clear) = if on { (START, STOP) } else { (STOP, START) };
        self.report(set, clear);
    }

    /// Notes something for a master that reads packets.
    fn report(&mut self, set: u8, clear: u8) {
        if let Some(packet) = &mut self.packet {
            *packet = *packet & !clear | set;
        }
    }

    /// Drops unread input.
    pub(in crate::sentry) fn flush_typed(&mut self) {
        self.lines.clear();
        self.line.clear();
        self.literal = false;
        self.edges += 1;
        self.report(FLUSH_READ, 0);
    }

    /// Drops unread output.
    pub(in crate::sentry) fn flush_shown(&mut self) {
        self.shown.clear();
        self.edges += 1;
        self.report(FLUSH_WRITE, 0);
    }

    /// Behaves otherwise from now on. Typed input stays: joined if the new mode has no lines, else
    /// as a line.
    pub(in crate::sentry) fn behave(&mut self, new: Termios) {
        let old = std::mem::replace(&mut self.termios, new);
        if old.is_canonical() && !self.termios.is_canonical() {
            let all: Vec<u8> = self.lines.drain(..).flatten().chain(self.line.drain(..)).collect();
            self.literal = false;
            if !all.is_empty() {
                self.lines.push_back(all);
            }
        }
        if !self.termios.has_input(libc::IXON) && old.has_input(libc::IXON) {
            self.flow(true);
        }
        match (old.flows(), self.termios.flows()) {
            (false, true) => self.report(DO_STOP, NO_STOP),
            (true, false) => self.report(NO_STOP, DO_STOP),
            _ => {}
        }
        self.edges += 1;
    }

    /// Takes the bytes that find room: typed ones, or output. Returns their number, and the signals
    /// of typed ones as a set.
    pub(in crate::sentry) fn take_piece(&mut self, piece: &[u8], typed: bool) -> (usize, u64) {
        let mut signals = 0;
        for (at, byte) in piece.iter().enumerate() {
            if !(if typed { self.takes() } else { self.has_room() }) {
                return (at, signals);
            }
            if !typed {
                self.show(*byte);
            } else if let Some(signal) = self.type_in(*byte) {
                signals |= bit(signal as u8);
            }
        }
        (piece.len(), signals)
    }

    /// The first readable bytes, at most `most`; of one line in canonical mode. They stay.
    pub(in crate::sentry) fn first(&self, most: usize) -> &[u8] {
        let first = self.lines.front().map(Vec::as_slice).unwrap_or_default();
        &first[..first.len().min(most)]
    }

    /// Takes the first `len` bytes; with its last byte a line is removed.
    pub(in crate::sentry) fn take_first(&mut self, len: usize) {
        self.edges += 1;
        if let Some(first) = self.lines.front_mut() {
            first.drain(..len.min(first.len()));
            if first.is_empty() {
                self.lines.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use afresh_files::Node;

    use super::*;

    fn typed(terminal: &mut Terminal, bytes: &[u8]) -> Vec<i32> {
        bytes.iter().filter_map(|byte| terminal.type_in(*byte)).collect()
    }

    fn drain_output(terminal: &mut Terminal) -> String {
        String::from_utf8_lossy(&terminal.shown.drain(..).collect::<Vec<_>>()).into_owned()
    }

    fn lines(terminal: &mut Terminal) -> Vec<String> {
        let lines = terminal.lines.drain(..);
        lines.map(|line| String::from_utf8_lossy(&line).into_owned()).collect()
    }

    #[test]
    fn lines_are_edited_as_they_are_typed() {
        let mut t = Terminal::new(Node(1));
        let gone = |count: usize| "\x08 \x08".repeat(count);
        for (keys, expected, echoed) in [
            (&b"ab\x7fc\r"[..], &["ac\n"][..], format!("ab{}c\r\n", gone(1))),
            (b"one two  \x17x\n", &["one x\n"], format!("one two  {}x\r\n", gone(5))),
            (b"gone\x15ok\n", &["ok\n"], format!("gone{}ok\r\n", gone(4))),
            (b"\x7f\x15\x17\n", &["\n"], "\r\n".to_owned()),
            (b"a\x16\x03b\n", &["a\x03b\n"], "a^\x08^Cb\r\n".to_owned()),
            (b"no end\x04\x04", &["no end", ""], "no end".to_owned()),
            (b"\n", &["\n"], "\r\n".to_owned()),
            (b"x\x12\n", &["x\n"], "x^R\r\nx\r\n".to_owned()),
            (b"\x01\x7f\n", &["\n"], format!("^A{}\r\n", gone(2))),
            (b"a\tb\x7f\x7f\n", &["a\n"], format!("a\tb{}\r\n", gone(8))),
        ] {
            assert!(typed(&mut t, keys).is_empty());
            assert_eq!(lines(&mut t), expected, "{keys:?}");
            assert_eq!(drain_output(&mut t), echoed, "{keys:?}");
        }
        t.termios.input |= libc::IUTF8;
        typed(&mut t, "aé\x7fb\n".as_bytes());
        assert_eq!(
            (lines(&mut t), drain_output(&mut t)),
            (vec!["ab\n".to_owned()], "aé\x08 \x08b\r\n".to_owned())
        );
    }

    #[test]
    fn some_bytes_are_signals_and_some_stop_output() {
        let mut t = Terminal::new(Node(1));
        t.packet = Some(0);
        assert_eq!(
            typed(&mut t, b"gone\x03\x1a\x1c"),
            [libc::SIGINT, libc::SIGTSTP, libc::SIGQUIT]
        );
        assert_eq!((t.line.len(), drain_output(&mut t)), (0, "^\\".to_owned()), "flushed at each");
        assert_eq!(t.packet.replace(0), Some(FLUSH_READ | FLUSH_WRITE));
        typed(&mut t, b"\x13");
        assert!(!t.has_room() && t.packet == Some(STOP));
        typed(&mut t, b"\x11");
        assert!(t.has_room() && t.packet == Some(START));
        t.termios.local &= !libc::ISIG;
        t.termios.input &= !libc::IXON;
        assert!(typed(&mut t, b"\x03\x13\n").is_empty() && lines(&mut t) == ["\x03\x13\n"]);
    }

    #[test]
    fn typed_lines_that_find_no_room_wait_and_none_is_cut() {
        let mut t = Terminal::new(Node(1));
        let pasted: Vec<String> = (0..163)
            .map(|n| format!("line {n:05} abcdefghijklmnopqrstuvwxyz0123456789\n"))
            .collect();
        let mut read = Vec::new();
        for byte in pasted.concat().bytes() {
            while !t.takes() {
                let line = t.first(TYPED).to_vec();
                t.take_first(line.len());
                read.push(String::from_utf8(line).unwrap());
            }
            assert!(t.type_in(byte).is_none());
        }
        read.extend(lines(&mut t));
        assert!(read == pasted, "{read:?}");
    }

    #[test]
    fn output_gets_its_returns_and_nothing_grows_without_bound() {
        let mut t = Terminal::new(Node(1));
        t.show_all(b"a\nb\tc\r");
        assert_eq!((drain_output(&mut t).as_str(), t.column), ("a\r\nb\tc\r", 0));
        t.termios.output |= libc::XTABS;
        t.show_all(b"b\tc");
        assert_eq!((drain_output(&mut t).as_str(), t.column), ("b       c", 9));
        t.termios.output = 0;
        t.show_all(b"a\n\t");
        assert_eq!(drain_output(&mut t), "a\n\t");
        (0..3 * MAX_UNREAD_OUTPUT).for_each(|_| t.show(b'x'));
        assert!(!t.has_room() && t.shown.len() <= MAX_UNREAD_OUTPUT);
        // A line that is too long is cut; complete lines wait.
        (0..3 * TYPED).for_each(|_| assert!(t.takes() && t.type_in(b'y').is_none()));
        typed(&mut t, b"\n");
        assert_eq!((t.lines.len(), t.readable(), t.takes()), (1, TYPED, false));
        let mut other = t.termios.clone();
        other.local &= !libc::ICANON;
        t.behave(other);
        assert_eq!((t.first(3), t.readable(), t.takes()), (&b"yyy"[..], TYPED, false));
        t.take_first(TYPED);
        typed(&mut t, b"raw\x7f\x04");
        assert_eq!(t.first(99), b"raw\x7f\x04");
    }
}
