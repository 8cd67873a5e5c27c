//! Lengths and branch targets of x86-64 instructions.
//!
//! Promises: an instruction has the length that the processor gives it, or is not recognised. May
//! break it: instructions of later processors in encodings that are in use today.

/// An instruction, as far as moving others next to it needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Instruction {
    pub(super) len: usize,
    /// The target of a direct jump or call, from the end of the instruction.
    pub(super) branch: Option<i64>,
}

/// The bytes that follow an opcode.
#[derive(Clone, Copy, Default)]
struct Operands {
    modrm: bool,
    /// Bytes of the constant.
    constant: usize,
    /// Whether the constant is the distance of a branch.
    branches: bool,
}

const NONE: Operands = Operands { modrm: false, constant: 0, branches: false };
const MODRM: Operands = Operands { modrm: true, ..NONE };
const MODRM_BYTE: Operands = Operands { constant: 1, ..MODRM };
const BYTE: Operands = Operands { constant: 1, ..NONE };
const SHORT_BRANCH: Operands = Operands { branches: true, ..BYTE };
const NEAR_BRANCH: Operands = Operands { constant: 4, branches: true, ..NONE };

/// Prefixes that change lengths.
#[derive(Clone, Copy, Default)]
struct Prefixes {
    /// 66.
    operand: bool,
    /// 67.
    address: bool,
    /// REX.W.
    wide: bool,
}

impl Prefixes {
    /// Bytes of a constant of the size of the operand, at most four.
    fn constant(self) -> usize {
        if self.operand && !self.wide { 2 } else { 4 }
    }
}

/// The instruction at the start of `code`; `None` if it is cut off or not known.
pub(super) fn decode(code: &[u8]) -> Option<Instruction> {
    let (mut at, mut prefixes) = (0, Prefixes::default());
    let mut opcode = *code.first()?;
    while let 0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3 = opcode {
        prefixes.operand |= opcode == 0x66;
        prefixes.address |= opcode == 0x67;
        at += 1;
        opcode = *code.get(at)?;
    }
    if opcode & 0xf0 == 0x40 {
        prefixes.wide = opcode & 8 != 0;
        at += 1;
        opcode = *code.get(at)?;
    }
    at += 1;
    let next = code.get(at).copied();
    let operands = match opcode {
        0x0f => {
            let (opcode, len) = match next? {
                0x38 => (Some(MODRM), 2),
                0x3a => (Some(MODRM_BYTE), 2),
                second => (two_bytes(second), 1),
            };
            at += len;
            opcode?
        }
        // VEX and EVEX.
        0xc4 | 0xc5 | 0x62 => {
            let (map, behind) = match opcode {
                0xc5 => (1, 1),
                0xc4 => (next? & 0x1f, 2),
                _ => (next? & 7, 3),
            };
            let opcode = *code.get(at + behind)?;
            at += behind + 1;
            match map {
                1 if opcode == 0x77 => NONE,
                1 if matches!(opcode, 0x70..=0x73 | 0xc2 | 0xc4..=0xc6) => MODRM_BYTE,
                3 => MODRM_BYTE,
                1 | 2 | 5 | 6 => MODRM,
                _ => return None,
            }
        }
        opcode => one_byte(opcode, prefixes, next)?,
    };
    if operands.modrm {
        at += modrm_len(code.get(at..)?)?;
    }
    let len = at + operands.constant;
    let constant = code.get(at..len)?;
    let branch = operands.branches.then(|| match *constant {
        [distance] => i64::from(distance as i8),
        [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
        _ => 0,
    });
    (len <= 15).then_some(Instruction { len, branch })
}

/// Bytes of the operand byte and of the address that follows it.
fn modrm_len(code: &[u8]) -> Option<usize> {
    let modrm = *code.first()?;
    let (mode, register) = (modrm >> 6, modrm & 7);
    if mode == 3 {
        return Some(1);
    }
    let indexed = register == 4;
    let base = if indexed { *code.get(1)? & 7 } else { register };
    let distance = match mode {
        0 if base == 5 => 4,
        0 => 0,
        1 => 1,
        _ => 4,
    };
    Some(1 + usize::from(indexed) + distance)
}

fn one_byte(opcode: u8, prefixes: Prefixes, next: Option<u8>) -> Option<Operands> {
    let sized = Operands { constant: prefixes.constant(), ..NONE };
    let modrm_sized = Operands { modrm: true, ..sized };
    // `test` has a constant, the other instructions of the group have none.
    let tests = next.is_some_and(|modrm| modrm & 0x38 <= 8);
    Some(match opcode {
        0x00..=0x3f => match opcode & 7 {
            0..=3 => MODRM,
            4 => BYTE,
            5 => sized,
            _ => return None,
        },
        0x50..=0x5f | 0x6c..=0x6f | 0x90..=0x99 | 0x9b..=0x9f | 0xa4..=0xa7 => NONE,
        0xaa..=0xaf | 0xc3 | 0xc9 | 0xcb | 0xcc | 0xcf | 0xd7 | 0xec..=0xef => NONE,
        0xf1 | 0xf4 | 0xf5 | 0xf8..=0xfd => NONE,
        0x63 | 0x84..=0x8e | 0xd0..=0xd3 | 0xd8..=0xdf | 0xfe | 0xff => MODRM,
        // Otherwise it is another encoding, of AMD's.
        0x8f if next? & 0x38 == 0 => MODRM,
        0x68 | 0xa9 => sized,
        0x69 | 0x81 | 0xc7 => modrm_sized,
        0x6a | 0xa8 | 0xb0..=0xb7 | 0xcd | 0xe4..=0xe7 => BYTE,
        0x6b | 0x80 | 0x83 | 0xc0 | 0xc1 | 0xc6 => MODRM_BYTE,
        0x70..=0x7f | 0xe0..=0xe3 | 0xeb => SHORT_BRANCH,
        0xa0..=0xa3 => Operands { constant: if prefixes.address { 4 } else { 8 }, ..NONE },
        0xb8..=0xbf if prefixes.wide => Operands { constant: 8, ..NONE },
        0xb8..=0xbf => sized,
        0xc2 | 0xca => Operands { constant: 2, ..NONE },
        0xc8 => Operands { constant: 3, ..NONE },
        0xe8 | 0xe9 if !prefixes.operand => NEAR_BRANCH,
        0xf6 => {
            if tests {
                MODRM_BYTE
            } else {
                MODRM
            }
        }
        0xf7 => {
            if tests {
                modrm_sized
            } else {
                MODRM
            }
        }
        _ => return None,
    })
}

fn two_bytes(opcode: u8) -> Option<Operands> {
    Some(match opcode {
        0x05..=0x09 | 0x0b | 0x30..=0x37 | 0x77 | 0xa0..=0xa2 | 0xa8..=0xaa | 0xc8..=0xcf => NONE,
        0x70..=0x73 | 0xa4 | 0xac | 0xba | 0xc2 | 0xc4..=0xc6 => MODRM_BYTE,
        0x80..=0x8f => NEAR_BRANCH,
        0x04 | 0x0a | 0x0c | 0x0e | 0x0f | 0x24..=0x27 | 0x38..=0x3f | 0xa6 | 0xa7 => return None,
        _ => MODRM,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_have_their_lengths() {
        let bytes = |text: &str| -> Vec<u8> {
            let text: String = text.split(' ').collect();
            (0..text.len() / 2)
                .map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap())
                .collect()
        };
        for text in [
            "b8 05 00 00 00",
            "0f 05",
            "c3",
            "48 8d 05 10 00 00 00",
            "80 3d 31 33 0e 00 00",
            "74 17",
            "31 c0",
            "48 3d 00 f0 ff ff",
            "f3 0f 1e fa",
            "66 2e 0f 1f 84 00 00 00 00 00",
            "48 b8 88 77 66 55 44 33 22 11",
            "f6 44 24 30 01",
            "f7 c3 00 01 00 00",
            "66 f7 c3 01 00",
            "f7 d8",
            "c5 f8 77",
            "c5 fd 6f 46 20",
            "62 f1 fe 48 6f 46 01",
            "c4 e3 79 0f c1 04",
            "66 0f 3a 0f c1 08",
            "0f 84 00 01 00 00",
            "ff 25 00 00 00 00",
            "e8 49 d5 f8 ff",
            "a1 88 77 66 55 44 33 22 11",
            "64 48 8b 04 25 28 00 00 00",
            "66 81 c1 34 12",
            "c8 01 00 02",
            "0f c7 0f",
        ] {
            let mut code = bytes(text);
            let len = code.len();
            for cut in 0..len {
                assert!(decode(&code[..cut]).is_none_or(|found| found.len <= cut), "{text}");
            }
            code.extend([0x90; 16]);
            assert_eq!(decode(&code).map(|found| found.len), Some(len), "{text}");
        }
        assert_eq!(decode(&[0x74, 0xfe]).unwrap().branch, Some(-2));
        assert_eq!(decode(&[0x0f, 0x85, 1, 1, 0, 0]).unwrap().branch, Some(257));
        for unknown in [[0x06; 16], [0x0f; 16], [0xea; 16], [0x66; 16]] {
            assert_eq!(decode(&unknown), None);
        }
    }
}
