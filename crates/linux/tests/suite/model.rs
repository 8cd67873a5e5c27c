//! Random programs of maps, writes, forks, checkpoints, rollbacks and relatives, against a naive
//! model that copies everything.

use crate::common;

use std::sync::OnceLock;
use std::time::Duration;

use afresh_linux::{Instance, Program, Warm};
use afresh_snapshot::{Branch, SnapshotId, Tree};
use afresh_sys::planted::{self, Bug};
use proptest::prelude::*;

const SLOTS: usize = 6;
const PROCESSES: usize = 4;
/// Maximum pages of a mapping, and of the heap.
const PAGES: usize = 24;

#[derive(Clone, Debug)]
enum Act {
    Map {
        slot: usize,
        pages: usize,
        shared: bool,
    },
    /// A part of the file, copy-on-write.
    File {
        slot: usize,
        pages: usize,
        from: usize,
    },
    WriteFile {
        page: usize,
        word: u64,
    },
    Cut {
        slot: usize,
        pages: usize,
    },
    Remap {
        slot: usize,
        pages: usize,
    },
    Write {
        slot: usize,
        page: usize,
        word: u64,
    },
    Protect {
        slot: usize,
        readonly: bool,
    },
    Empty {
        slot: usize,
        page: usize,
    },
    Break {
        pages: usize,
    },
    WriteHeap {
        page: usize,
        word: u64,
    },
    Fork {
        child: usize,
    },
    Kill {
        child: usize,
    },
}

#[derive(Clone, Debug)]
enum Step {
    Act {
        branch: usize,
        who: usize,
        act: Act,
    },
    Snapshot {
        branch: usize,
    },
    Restore {
        branch: usize,
        back: usize,
    },
    /// A relative takes the branch's place.
    Fork {
        branch: usize,
        back: usize,
    },
    Look {
        branch: usize,
    },
    /// Calls from one state, again and again: the write set is sampled.
    Repeat {
        branch: usize,
        times: usize,
        act: Act,
    },
    /// A state that is frozen and left again is the same elsewhere.
    Freeze {
        branch: usize,
    },
}

fn act() -> impl Strategy<Value = Act> {
    let slot = || 0..SLOTS;
    let pages = || 1..=PAGES;
    let page = || 0..PAGES;
    prop_oneof![
        3 => (slot(), pages(), prop::bool::weighted(0.3))
            .prop_map(|(slot, pages, shared)| Act::Map { slot, pages, shared }),
        2 => (slot(), pages(), page())
            .prop_map(|(slot, pages, from)| Act::File { slot, pages, from }),
        2 => (0..2 * PAGES, 1..4_u64).prop_map(|(page, word)| Act::WriteFile { page, word }),
        1 => (slot(), page()).prop_map(|(slot, pages)| Act::Cut { slot, pages }),
        2 => (slot(), pages()).prop_map(|(slot, pages)| Act::Remap { slot, pages }),
        8 => (slot(), page(), 0..4_u64).prop_map(|(slot, page, word)| Act::Write { slot, page, word }),
        1 => (slot(), any::<bool>()).prop_map(|(slot, readonly)| Act::Protect { slot, readonly }),
        1 => (slot(), page()).prop_map(|(slot, page)| Act::Empty { slot, page }),
        2 => page().prop_map(|pages| Act::Break { pages }),
        3 => (page(), 0..4_u64).prop_map(|(page, word)| Act::WriteHeap { page, word }),
        2 => (1..PROCESSES).prop_map(|child| Act::Fork { child }),
        1 => (1..PROCESSES).prop_map(|child| Act::Kill { child }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let branch = || prop_oneof![3 => Just(0), 1 => Just(1_usize)];
    let state = || prop_oneof![2 => Just(0), 1 => 0..16_usize];
    let who = || prop_oneof![2 => Just(0), 1 => 0..PROCESSES];
    prop_oneof![
        16 => (branch(), who(), act())
            .prop_map(|(branch, who, act)| Step::Act { branch, who, act }),
        3 => branch().prop_map(|branch| Step::Snapshot { branch }),
        4 => (branch(), state()).prop_map(|(branch, back)| Step::Restore { branch, back }),
        1 => (branch(), state()).prop_map(|(branch, back)| Step::Fork { branch, back }),
        2 => branch().prop_map(|branch| Step::Look { branch }),
        1 => branch().prop_map(|branch| Step::Freeze { branch }),
        1 => (branch(), 1..60_usize, act())
            .prop_map(|(branch, times, act)| Step::Repeat { branch, times, act }),
    ]
}

/// The content of a mapping.
#[derive(Clone, Debug)]
enum Content {
    Own(Vec<u64>),
    /// The first pages of memory that several processes may map.
    Shared(usize, usize),
}

#[derive(Clone, Debug)]
struct Slot {
    content: Content,
    readonly: bool,
    /// Whether it began as a part of the file.
    filed: bool,
}

impl Slot {
    fn len(&self) -> usize {
        match &self.content {
            Content::Own(pages) => pages.len(),
            Content::Shared(_, len) => *len,
        }
    }
}

/// A process.
#[derive(Clone, Debug, Default)]
struct Kin {
    slots: [Option<Slot>; SLOTS],
    heap: Vec<u64>,
}

/// All that the program should hold: every page is one word, again and again.
#[derive(Clone, Debug)]
struct World {
    kin: [Option<Kin>; PROCESSES],
    shared: Vec<Vec<u64>>,
    file: Vec<u64>,
}

impl World {
    fn new() -> Self {
        let mut kin: [Option<Kin>; PROCESSES] = Default::default();
        kin[0] = Some(Kin::default());
        Self { kin, shared: Vec::new(), file: vec![0; 2 * PAGES] }
    }

    /// Performs it, and returns the line for the program; `None` if it is impossible.
    fn act(&mut self, who: usize, act: &Act) -> Option<String> {
        let (what, a, b, c) = match *act {
            Act::Fork { child } => {
                if who != 0 || self.kin[child].is_some() {
                    return None;
                }
                self.kin[child] = self.kin[0].clone();
                ('f', child, 0, 0)
            }
            Act::Kill { child } => {
                self.kin[child].take().filter(|_| who == 0)?;
                ('k', child, 0, 0)
            }
            Act::Map { slot, pages, shared } => {
                let own = self.kin[who].as_mut()?;
                let content = match shared {
                    false => Content::Own(vec![0; pages]),
                    true => {
                        self.shared.push(vec![0; pages]);
                        Content::Shared(self.shared.len() - 1, pages)
                    }
                };
                own.slots[slot] = Some(Slot { content, readonly: false, filed: false });
                (if shared { 'M' } else { 'm' }, slot, pages, 0)
            }
            Act::File { slot, pages, from } => {
                let content = Content::Own(self.file[from..from + pages].to_vec());
                let own = self.kin[who].as_mut()?;
                own.slots[slot] = Some(Slot { content, readonly: false, filed: true });
                ('F', slot, pages, from as u64)
            }
            Act::WriteFile { page, word } => {
                self.kin[who].as_ref()?;
                self.file[page] = word;
                ('X', 0, page, word)
            }
            Act::Break { pages } => {
                self.kin[who].as_mut()?.heap.resize(pages, 0);
                ('b', pages, 0, 0)
            }
            Act::WriteHeap { page, word } => {
                *self.kin[who].as_mut()?.heap.get_mut(page)? = word;
                ('W', 0, page, word)
            }
            Act::Cut { slot, .. }
            | Act::Remap { slot, .. }
            | Act::Write { slot, .. }
            | Act::Protect { slot, .. }
            | Act::Empty { slot, .. } => {
                let place = &mut self.kin[who].as_mut()?.slots[slot];
                let mapped = place.as_mut()?;
                match *act {
                    Act::Cut { pages, .. } => {
                        if pages >= mapped.len() {
                            return None;
                        }
                        match &mut mapped.content {
                            Content::Own(own) => own.truncate(pages),
                            Content::Shared(_, len) => *len = pages,
                        }
                        if pages == 0 {
                            *place = None;
                        }
                        ('t', slot, pages, 0)
                    }
                    Act::Remap { pages, .. } => {
                        let Content::Own(own) = &mut mapped.content else { return None };
                        if mapped.filed && pages > own.len() {
                            return None;
                        }
                        own.resize(pages, 0);
                        ('r', slot, pages, 0)
                    }
                    Act::Write { page, word, .. } => {
                        if mapped.readonly || page >= mapped.len() {
                            return None;
                        }
                        match &mut mapped.content {
                            Content::Own(own) => own[page] = word,
                            Content::Shared(id, _) => self.shared[*id][page] = word,
                        }
                        ('w', slot, page, word)
                    }
                    Act::Protect { readonly, .. } => {
                        mapped.readonly = readonly;
                        ('p', slot, usize::from(readonly), 0)
                    }
                    Act::Empty { page, .. } => {
                        if page >= mapped.len() || mapped.filed {
                            return None;
                        }
                        if let Content::Own(own) = &mut mapped.content {
                            own[page] = 0;
                        }
                        ('d', slot, page, 0)
                    }
                    _ => return None,
                }
            }
        };
        Some(format!("{who} {what} {a} {b} {c}\n"))
    }

    /// The sum that a process should return.
    fn sum(&self, kin: &Kin) -> u64 {
        let mix = |sum: u64, word: u64| (sum ^ word).wrapping_mul(0x0100_0000_01b3);
        let mut all = 0xcbf2_9ce4_8422_2325;
        for slot in &kin.slots {
            let (pages, shared, readonly): (&[u64], _, _) = match slot {
                None => (&[], false, false),
                Some(slot) => match &slot.content {
                    Content::Own(pages) => (pages, false, slot.readonly),
                    Content::Shared(id, len) => (&self.shared[*id][..*len], true, slot.readonly),
                },
            };
            for word in [pages.len() as u64, shared.into(), readonly.into()] {
                all = mix(all, word);
            }
            all = pages.iter().fold(all, |all, word| mix(all, *word));
        }
        kin.heap.iter().fold(mix(all, kin.heap.len() as u64), |all, word| mix(all, *word))
    }
}

/// A guest, and its expected content.
struct LiveProcess {
    branch: Branch<Instance>,
    world: World,
}

impl LiveProcess {
    fn ask(&mut self, line: &str) -> Result<u64, TestCaseError> {
        let guest = self.branch.guest_mut().map_err(|e| TestCaseError::fail(e.to_string()))?;
        let answer = guest.call(line.as_bytes());
        let answer = answer.map_err(|e| TestCaseError::fail(format!("{line:?}: {e:?}")))?;
        let text = String::from_utf8_lossy(&answer).into_owned();
        let told = text.trim().parse();
        told.map_err(|_| TestCaseError::fail(format!("{line:?} was answered by {text:?}")))
    }

    /// Every process holds its expected content.
    fn look(&mut self) -> Result<(), TestCaseError> {
        for who in 0..PROCESSES {
            let Some(wanted) = self.world.kin[who].as_ref().map(|kin| self.world.sum(kin)) else {
                continue;
            };
            prop_assert_eq!(self.ask(&format!("{who} s\n"))?, wanted, "process {}", who);
        }
        Ok(())
    }
}

/// The program, and its warm state.
struct Mapper {
    program: Program,
    warm: Warm,
}

fn mapper() -> Option<&'static Mapper> {
    static MADE: OnceLock<Option<Mapper>> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let path = common::compiled("mapper.c", &["-static"])?;
        let program = Program::new(path).time_limit(Duration::from_secs(20));
        let warm = common::here(program.warm())?;
        Some(Mapper { program, warm })
    });
    made.as_ref()
}

fn play(mapper: &Mapper, steps: &[Step]) -> Result<(), TestCaseError> {
    let failed = |error: &dyn std::error::Error| TestCaseError::fail(format!("{error:?}"));
    let sown =
        |warm: &Warm| Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    let first = sown(&mapper.warm);
    let mut states: Vec<(SnapshotId, World)> = vec![(first.at(), World::new())];
    let other = first.fork(first.at()).map_err(|e| failed(&e))?;
    let mut lives = [first, other].map(|branch| LiveProcess { branch, world: World::new() });
    for step in steps {
        match step {
            Step::Act { branch, who, act } => {
                let live = &mut lives[*branch];
                if let Some(line) = live.world.act(*who, act) {
                    prop_assert_eq!(live.ask(&line)?, 1, "{}", line);
                }
            }
            Step::Snapshot { branch } => {
                let live = &mut lives[*branch];
                let id = live.branch.checkpoint().map_err(|e| failed(&e))?;
                states.push((id, live.world.clone()));
            }
            Step::Restore { branch, back } => {
                let (id, world) = &states[states.len() - 1 - back % states.len()];
                let live = &mut lives[*branch];
                live.branch.rollback(*id).map_err(|e| failed(&e))?;
                live.world = world.clone();
                if back % 2 == 0 {
                    let guest = live.branch.guest_mut().map_err(|e| failed(&e))?;
                    guest.verify().map_err(|e| failed(&e))?;
                }
                live.look()?;
            }
            Step::Fork { branch, back } => {
                let (id, world) = &states[states.len() - 1 - back % states.len()];
                let fork = lives[*branch].branch.fork(*id).map_err(|e| failed(&e))?;
                lives[*branch] = LiveProcess { branch: fork, world: world.clone() };
                lives[*branch].look()?;
            }
            Step::Look { branch } => lives[*branch].look()?,
            Step::Repeat { branch, times, act } => {
                let live = &mut lives[*branch];
                let id = live.branch.checkpoint().map_err(|e| failed(&e))?;
                let world = live.world.clone();
                states.push((id, world.clone()));
                for _ in 0..*times {
                    if let Some(line) = live.world.act(0, act) {
                        prop_assert_eq!(live.ask(&line)?, 1, "{}", line);
                    }
                    live.branch.rollback(id).map_err(|e| failed(&e))?;
                    live.world = world.clone();
                }
                live.look()?;
            }
            Step::Freeze { branch } => {
                let live = &mut lives[*branch];
                let guest = live.branch.guest_mut().map_err(|e| failed(&e))?;
                let frozen = guest.freeze().map_err(|e| failed(&e))?;
                let thawed = Warm::thaw(&frozen, &mapper.program).map_err(|e| failed(&e))?;
                let branch = sown(&thawed);
                let mut copy = LiveProcess { branch, world: live.world.clone() };
                copy.look()?;
                copy.branch.rollback(copy.branch.at()).map_err(|e| failed(&e))?;
                copy.look()?;
                live.look()?;
            }
        }
    }
    lives.iter_mut().try_for_each(LiveProcess::look)
}

#[test]
fn planted_bugs_are_caught() {
    if mapper().is_some() {
        planted::must_be_caught(
            &[Bug::Family, Bug::Mapping, Bug::Register, Bug::Window],
            &["model::memory_is_what_the_model_says"],
        );
    }
}

#[test]
fn earlier_failures_of_the_model_stay_fixed() {
    let Some(mapper) = mapper() else { return };
    let act = |act| Step::Act { branch: 0, who: 0, act };
    let map = |pages| act(Act::Map { slot: 0, pages, shared: false });
    let (snapshot, back) = (Step::Snapshot { branch: 0 }, |back| Step::Restore { branch: 0, back });
    let write = act(Act::Write { slot: 0, page: 0, word: 1 });
    let protect = act(Act::Protect { slot: 0, readonly: true });
    let fork = Step::Fork { branch: 0, back: 0 };
    // Copied back to where it may not be written any more.
    let closed = [map(4), snapshot.clone(), write, protect, snapshot.clone(), fork];
    play(mapper, &closed).unwrap();
    // Watched at an address with another mapping by now.
    let keep = || [snapshot.clone(), snapshot.clone()];
    let begin = [&[act(Act::Fork { child: 1 }), back(0)][..], &keep(), &[back(0), map(1)]];
    let heap = [&[back(0), back(0)][..], &keep(), &[act(Act::Break { pages: 2 })]];
    let write = act(Act::WriteHeap { page: 0, word: 1 });
    let written = [snapshot.clone(), back(0), snapshot.clone(), write, snapshot.clone(), back(3)];
    let last = [snapshot.clone(), map(1), Step::Look { branch: 0 }, snapshot];
    let reused = [begin.concat(), heap.concat(), written.to_vec(), last.to_vec()].concat();
    play(mapper, &reused).unwrap();
    // Shared memory whose protection was set to the same again.
    let share = act(Act::Map { slot: 3, pages: 1, shared: true });
    let open = act(Act::Protect { slot: 3, readonly: false });
    let write = act(Act::Write { slot: 3, page: 0, word: 1 });
    let shared = [share, Step::Snapshot { branch: 0 }, open, write, back(0), back(0)];
    play(mapper, &shared).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn memory_is_what_the_model_says(steps in prop::collection::vec(step(), 1..200)) {
        if let Some(mapper) = mapper() {
            play(mapper, &steps)?;
        }
    }
}
