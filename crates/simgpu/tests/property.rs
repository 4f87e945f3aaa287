//! Random sequences of memory calls against a small model: which bytes are charged, which calls are refused, what memory holds.

#![allow(non_snake_case, reason = "the driver's names")]

mod common;

use std::collections::BTreeMap;

use common::*;
use ebb_abi::*;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

const UNIT: usize = 2 * MIB;
/// Of the simulated device, in units of 2 MiB; small, so that it runs full.
const CAPACITY: usize = 24;
/// Units of the one reservation that everything is mapped in.
const SPACE: usize = 16;

#[derive(Debug, Clone)]
enum Op {
    Alloc(usize),
    Free(usize),
    Create(usize),
    Release(usize),
    Retain(usize),
    Map { handle: usize, at: usize },
    Unmap { at: usize, units: usize },
    Write { at: usize, value: u8 },
    Check { at: usize },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        3 => (1..6_usize).prop_map(Op::Alloc),
        2 => any::<prop::sample::Index>().prop_map(|index| Op::Free(index.index(1 << 20))),
        3 => (1..6_usize).prop_map(Op::Create),
        2 => (0..64_usize).prop_map(Op::Release),
        1 => (0..SPACE).prop_map(Op::Retain),
        5 => (0..64_usize, 0..SPACE).prop_map(|(handle, at)| Op::Map { handle, at }),
        3 => (0..SPACE, 1..6_usize).prop_map(|(at, units)| Op::Unmap { at, units }),
        4 => (0..SPACE, 1..255_u8).prop_map(|(at, value)| Op::Write { at, value }),
        3 => (0..SPACE).prop_map(|at| Op::Check { at }),
    ];
    prop::collection::vec(op, 1..60)
}

/// One physical memory in the model.
#[derive(Debug, Clone)]
struct Phys {
    units: usize,
    references: usize,
    mappings: usize,
    /// What each unit was last filled with.
    content: Vec<u8>,
}

impl Phys {
    fn lives(&self) -> bool {
        self.references > 0 || self.mappings > 0
    }
}

#[derive(Debug, Default)]
struct Model {
    allocs: Vec<(CUdeviceptr, usize)>,
    phys: Vec<(CUmemGenericAllocationHandle, Phys)>,
    /// First unit to the index of what is mapped there.
    mappings: BTreeMap<usize, usize>,
}

impl Model {
    fn used(&self) -> usize {
        let allocs: usize = self.allocs.iter().map(|(_, units)| units).sum();
        let phys: usize = self
            .phys
            .iter()
            .filter(|(_, phys)| phys.lives())
            .map(|(_, phys)| phys.units)
            .sum();
        allocs + phys
    }

    fn mapping_at(&self, at: usize) -> Option<(usize, usize)> {
        let (start, index) = self.mappings.range(..=at).next_back()?;
        (at < start + self.phys[*index].1.units).then_some((*start, *index))
    }

    fn is_free(&self, at: usize, units: usize) -> bool {
        at + units <= SPACE && (at..at + units).all(|unit| self.mapping_at(unit).is_none())
    }

    /// The mappings that make up a span exactly.
    fn whole(&self, at: usize, units: usize) -> Option<Vec<usize>> {
        let mut starts = Vec::new();
        let mut next = at;
        while next < at + units {
            starts.push(next);
            next += self.phys[*self.mappings.get(&next)?].1.units;
        }
        (next == at + units).then_some(starts)
    }
}

/// One case. Whatever it comes to, the next one (a smaller one, after a failure) begins with nothing charged.
fn run(cuda: &Cuda, base: CUdeviceptr, ops: &[Op]) -> Result<(), TestCaseError> {
    let mut model = Model::default();
    let result = steps(cuda, base, ops, &mut model);
    for (address, _) in &model.allocs {
        let _ = cuda.cuMemFree_v2(*address);
    }
    for at in 0..SPACE {
        for units in 1..6 {
            let _ = cuda.cuMemUnmap(plus(base, at * UNIT), units * UNIT);
        }
    }
    for (handle, _) in &model.phys {
        while cuda.cuMemRelease(*handle).is_success() {}
    }
    result?;
    prop_assert_eq!(
        cuda.free_bytes(),
        CAPACITY * UNIT,
        "after everything was given back"
    );
    Ok(())
}

fn steps(cuda: &Cuda, base: CUdeviceptr, ops: &[Op], model: &mut Model) -> Result<(), TestCaseError> {
    let place = |at: usize| plus(base, at * UNIT);
    let invalid = Err(CUresult::ERROR_INVALID_VALUE);
    for op in ops {
        match *op {
            Op::Alloc(units) => {
                let fits = model.used() + units <= CAPACITY;
                let got = cuda.try_alloc(units * UNIT);
                if let Ok(address) = got {
                    model.allocs.push((address, units));
                }
                let wanted = if fits {
                    None
                } else {
                    Some(CUresult::ERROR_OUT_OF_MEMORY)
                };
                prop_assert_eq!(got.err(), wanted, "{:?}", op);
            }
            Op::Free(index) => {
                if model.allocs.is_empty() {
                    prop_assert_eq!(cuda.cuMemFree_v2(place(index % SPACE)).ok(), invalid);
                } else {
                    let (address, _) = model.allocs.swap_remove(index % model.allocs.len());
                    prop_assert_eq!(cuda.cuMemFree_v2(plus(address, 512)).ok(), invalid);
                    prop_assert_eq!(cuda.cuMemFree_v2(address), CUresult::SUCCESS);
                }
            }
            Op::Create(units) => {
                let fits = model.used() + units <= CAPACITY;
                let got = cuda.try_create(units * UNIT, &cuda.device_properties());
                prop_assert_eq!(got.is_ok(), fits, "{:?}", op);
                if let Ok(handle) = got {
                    let phys = Phys {
                        units,
                        references: 1,
                        mappings: 0,
                        content: vec![0; units],
                    };
                    model.phys.push((handle, phys));
                }
            }
            Op::Release(index) => {
                let count = model.phys.len();
                if count > 0 {
                    let (handle, phys) = &mut model.phys[index % count];
                    let wanted = if phys.references > 0 { Ok(()) } else { invalid };
                    prop_assert_eq!(cuda.cuMemRelease(*handle).ok(), wanted);
                    phys.references = phys.references.saturating_sub(1);
                }
            }
            Op::Retain(at) => {
                let mut handle = CUmemGenericAllocationHandle::NULL;
                let address = place(at).0 as *mut std::ffi::c_void;
                let result = cuda.cuMemRetainAllocationHandle(&mut handle, address).ok();
                match model.mapping_at(at) {
                    None => prop_assert_eq!(result, invalid),
                    Some((_, index)) => {
                        prop_assert_eq!(result, Ok(()));
                        let (known, phys) = &mut model.phys[index];
                        // The same handle while it lives, and a new one for the same memory otherwise.
                        if phys.references > 0 {
                            prop_assert_eq!(handle, *known);
                        }
                        *known = handle;
                        phys.references += 1;
                    }
                }
            }
            Op::Map { handle, at } => {
                let count = model.phys.len();
                if count == 0 {
                    continue;
                }
                let index = handle % count;
                let (known, phys) = model.phys[index].clone();
                let wanted = phys.references > 0 && model.is_free(at, phys.units);
                let bytes = phys.units * UNIT;
                let result = cuda.cuMemMap(place(at), bytes, 0, known, 0).ok();
                prop_assert_eq!(result, if wanted { Ok(()) } else { invalid }, "{:?}", op);
                if wanted {
                    ok(cuda.set_access(place(at), bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
                    model.mappings.insert(at, index);
                    model.phys[index].1.mappings += 1;
                }
            }
            Op::Unmap { at, units } => {
                let units = units.min(SPACE - at);
                let whole = model.whole(at, units);
                let result = cuda.cuMemUnmap(place(at), units * UNIT).ok();
                prop_assert_eq!(result, if whole.is_some() { Ok(()) } else { invalid }, "{:?}", op);
                for start in whole.unwrap_or_default() {
                    if let Some(index) = model.mappings.remove(&start) {
                        model.phys[index].1.mappings -= 1;
                    }
                }
            }
            Op::Write { at, value } => {
                if let Some((start, index)) = model.mapping_at(at) {
                    ok(cuda.cuMemsetD8_v2(place(at), value, UNIT));
                    // Filling is done later, and unmapping waits for nothing.
                    ok(cuda.cuStreamSynchronize(NO_STREAM));
                    model.phys[index].1.content[at - start] = value;
                }
            }
            Op::Check { at } => {
                if let Some((start, index)) = model.mapping_at(at) {
                    // The first and the last byte of the unit, wherever it is mapped.
                    let value = model.phys[index].1.content[at - start];
                    prop_assert_eq!(cuda.read(place(at), 1), vec![value]);
                    prop_assert_eq!(cuda.read(plus(place(at), UNIT - 1), 1), vec![value]);
                }
            }
        }
        prop_assert_eq!(
            cuda.free_bytes(),
            (CAPACITY - model.used()) * UNIT,
            "after {:?}",
            op
        );
    }
    Ok(())
}

#[test]
fn memory_calls_agree_with_the_model() {
    let variables = [("EBB_SIM_MEMORY", "48Mi"), ("EBB_SIM_CONTEXT_BYTES", "0")];
    alone("memory_calls_agree_with_the_model", &variables, |cuda| {
        let base = cuda.reserve(SPACE * UNIT);
        // A fixed seed: a failure is the same on every machine, and proptest prints the smallest sequence.
        let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let config = Config {
            cases: 300,
            failure_persistence: None,
            ..Config::default()
        };
        TestRunner::new_with_rng(config, rng)
            .run(&ops(), |ops| run(cuda, base, &ops))
            .unwrap();
    });
}
