//! What memory is made with beyond the plain: exportable by descriptor, and fit for network cards.
//!
//! Memory of `cuMemAlloc` has both, so memory that stands for it asks for both. Not every driver gives them: containers may
//! forbid one, virtual machines the other. Which it gives is found out by the first memory that is made; from then on an
//! error is an error, and never a reason to make memory with less. That a driver answers a question about such memory proves nothing.

use std::sync::atomic::{AtomicU8, Ordering};

use ebb_abi::CUresult;
use ebb_device::DeviceError;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extras {
    /// A descriptor of the memory can be had.
    pub(crate) export: bool,
    /// Network cards may read and write it.
    pub(crate) rdma: bool,
}

const EXPORT: u8 = 1;
const RDMA: u8 = 2;
/// A call with these bits has succeeded.
const KNOWN: u8 = 4;

impl Extras {
    const fn bits(self) -> u8 {
        self.export as u8 * EXPORT + self.rdma as u8 * RDMA
    }

    const fn of(bits: u8) -> Self {
        Self {
            export: bits & EXPORT != 0,
            rdma: bits & RDMA != 0,
        }
    }
}

/// What a device's driver gives.
#[derive(Debug)]
pub(crate) struct Options {
    wanted: u8,
    now: AtomicU8,
}

impl Options {
    pub(crate) fn new(rdma: bool) -> Self {
        let wanted = Extras { export: true, rdma }.bits();
        Self {
            wanted,
            now: AtomicU8::new(wanted),
        }
    }

    /// Makes memory with what the driver gives; if nobody knows yet what that is, with less and less.
    pub(crate) fn with(
        &self,
        call: impl FnMut(Extras) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        self.narrow(KNOWN, call)
    }

    /// Asks something about such memory, the same way.
    pub(crate) fn ask(&self, call: impl FnMut(Extras) -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        self.narrow(0, call)
    }

    fn narrow(
        &self,
        proof: u8,
        mut call: impl FnMut(Extras) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let now = self.now.load(Ordering::Acquire);
        let first = call(Extras::of(now));
        if now & KNOWN != 0 || !first.is_err_and(is_refusal) {
            if first.is_ok() && now & KNOWN == 0 {
                self.now.store(now | proof, Ordering::Release);
            }
            return first;
        }
        for bits in [self.wanted & EXPORT, self.wanted & RDMA, 0] {
            if bits != now && call(Extras::of(bits)).is_ok() {
                self.now.store(bits | proof, Ordering::Release);
                return Ok(());
            }
        }
        first
    }

    /// What memory is asked for with now.
    pub(crate) fn gives(&self) -> Extras {
        Extras::of(self.now.load(Ordering::Acquire))
    }

    /// What the driver gives, if a call has shown it.
    pub(crate) fn known(&self) -> Option<Extras> {
        let now = self.now.load(Ordering::Acquire);
        (now & KNOWN != 0).then_some(Extras::of(now))
    }

    pub(crate) fn lacks(&self) -> &'static str {
        let now = self.now.load(Ordering::Acquire);
        match (self.wanted & !now) & (EXPORT | RDMA) {
            0 => "",
            EXPORT => "sharing with other processes",
            RDMA => "access by network cards",
            _ => "sharing with other processes, access by network cards",
        }
    }
}

/// Whether an error may mean that the driver does not give what was asked for.
fn is_refusal(error: DeviceError) -> bool {
    const NOT_PERMITTED: u32 = 800;
    matches!(error, DeviceError::Driver { code, .. }
        if matches!(CUresult(code), CUresult::ERROR_INVALID_VALUE | CUresult::ERROR_NOT_SUPPORTED) || code == NOT_PERMITTED)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused() -> DeviceError {
        DeviceError::Driver {
            code: 801,
            call: "cuMemCreate",
        }
    }

    /// vLLM#29569, nixl#1754: memory is made fit for network cards and for other processes, where the driver gives that.
    #[test]
    fn bug_094_098_memory_is_made_with_all_that_the_driver_gives() {
        let all = Options::new(true);
        let mut asked = Vec::new();
        let mut none_for_rdma = |extras: Extras| {
            asked.push(extras);
            if extras.rdma { Err(refused()) } else { Ok(()) }
        };
        assert_eq!(all.with(&mut none_for_rdma), Ok(()));
        assert_eq!(all.with(&mut none_for_rdma), Ok(()));
        let (both, export) = (
            Extras {
                export: true,
                rdma: true,
            },
            Extras {
                export: true,
                rdma: false,
            },
        );
        assert_eq!(asked, [both, export, export], "it is asked for once");
        assert_eq!(all.lacks(), "access by network cards");
    }

    #[test]
    fn an_answer_about_memory_is_no_memory() {
        let options = Options::new(true);
        assert_eq!(options.ask(|_| Ok(())), Ok(()));
        assert_eq!((options.known(), options.lacks()), (None, ""));
        let made = options.with(|extras| if extras.rdma { Err(refused()) } else { Ok(()) });
        assert_eq!(made, Ok(()));
        assert_eq!(options.lacks(), "access by network cards");
        assert_eq!(
            options.known().map(|extras| (extras.export, extras.rdma)),
            Some((true, false))
        );
    }

    #[test]
    fn what_was_given_once_is_not_given_up() {
        let options = Options::new(true);
        assert_eq!(options.with(|_| Ok(())), Ok(()));
        let mut calls = 0;
        let failed = options.with(|extras| {
            calls += 1;
            assert!(extras.export && extras.rdma);
            Err(refused())
        });
        assert_eq!((failed, calls), (Err(refused()), 1));
        assert_eq!(options.lacks(), "");
    }

    #[test]
    fn a_full_card_is_no_refusal() {
        let options = Options::new(false);
        let mut calls = 0;
        let full = options.with(|extras| {
            calls += 1;
            assert!(!extras.rdma, "the device does not have it");
            Err(DeviceError::OutOfMemory)
        });
        assert_eq!((full, calls), (Err(DeviceError::OutOfMemory), 1));
        let nothing = options.with(|_| Err(refused()));
        assert_eq!(nothing, Err(refused()));
        assert_eq!(options.with(|_| Ok(())), Ok(()));
        assert_eq!(options.lacks(), "");
    }
}
