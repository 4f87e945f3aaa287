//! The driver's calls for it, looked up by name. None of them is older than driver 570.

use std::path::Path;

use ebb_abi::{
    CUcheckpointCheckpointArgs, CUcheckpointLockArgs, CUcheckpointRestoreArgs, CUcheckpointUnlockArgs,
    CUprocessState, CUresult, Zero,
};

/// What a helper asks of the driver.
pub(super) trait Calls {
    /// The state of a process.
    fn state(&self, pid: i32) -> Result<CUprocessState, CUresult>;
    /// Keeps the calls of a process out and waits for its work, `ms` at most.
    fn lock(&self, pid: i32, ms: u32) -> Result<(), CUresult>;
    /// Moves the memory of a locked process to the host.
    fn checkpoint(&self, pid: i32) -> Result<(), CUresult>;
    /// The way back, to the locked state.
    fn restore(&self, pid: i32) -> Result<(), CUresult>;
    /// Lets the calls of a locked process in.
    fn unlock(&self, pid: i32) -> Result<(), CUresult>;
}

type Init = unsafe extern "C" fn(u32) -> CUresult;
type State = unsafe extern "C" fn(i32, *mut CUprocessState) -> CUresult;
type Call<Args> = unsafe extern "C" fn(i32, *mut Args) -> CUresult;

/// An initialised driver.
#[derive(Debug)]
pub(super) struct Driver {
    state: State,
    lock: Call<CUcheckpointLockArgs>,
    checkpoint: Call<CUcheckpointCheckpointArgs>,
    restore: Call<CUcheckpointRestoreArgs>,
    unlock: Call<CUcheckpointUnlockArgs>,
    /// What holds the functions above in memory; dropped last.
    _library: libloading::Library,
}

impl Driver {
    /// Loads and starts it.
    pub(super) fn load(path: &Path) -> Result<Self, String> {
        // SAFETY: loading runs the library's constructors; the driver's (like the simulated one's) do nothing that breaks this process,
        // which was started for nothing else.
        let library = unsafe { libloading::Library::new(path) }
            .map_err(|error| format!("{} cannot be loaded: {error}", path.display()))?;
        /// A function of the library, as a pointer that is valid while the library stays loaded.
        fn find<T: Copy>(library: &libloading::Library, name: &str) -> Result<T, String> {
            // SAFETY: each caller names the type that the driver's header gives for this function; the struct below keeps the
            // library loaded for as long as the pointer can be called.
            unsafe { library.get::<T>(name.as_bytes()) }
                .map(|symbol| *symbol)
                .map_err(|_| format!("the driver lacks {name}: a checkpoint needs version 570 or newer"))
        }
        let init: Init = find(&library, "cuInit")?;
        let driver = Self {
            state: find(&library, "cuCheckpointProcessGetState")?,
            lock: find(&library, "cuCheckpointProcessLock")?,
            checkpoint: find(&library, "cuCheckpointProcessCheckpoint")?,
            restore: find(&library, "cuCheckpointProcessRestore")?,
            unlock: find(&library, "cuCheckpointProcessUnlock")?,
            _library: library,
        };
        // SAFETY: takes no pointers and may be called at any time.
        unsafe { init(0) }
            .ok()
            .map_err(|code| format!("cuInit answered {}", code.0))?;
        Ok(driver)
    }
}

impl Calls for Driver {
    fn state(&self, pid: i32) -> Result<CUprocessState, CUresult> {
        let mut state = CUprocessState(0);
        // SAFETY: the driver is initialised; a valid place for the answer.
        unsafe { (self.state)(pid, &raw mut state) }.ok()?;
        Ok(state)
    }

    fn lock(&self, pid: i32, ms: u32) -> Result<(), CUresult> {
        let mut args = CUcheckpointLockArgs {
            timeoutMs: ms,
            ..CUcheckpointLockArgs::ZERO
        };
        // SAFETY: the driver is initialised; a structure of its own layout, zero where nothing is said.
        unsafe { (self.lock)(pid, &raw mut args) }.ok()
    }

    fn checkpoint(&self, pid: i32) -> Result<(), CUresult> {
        let mut args = CUcheckpointCheckpointArgs::ZERO;
        // SAFETY: as in `lock`.
        unsafe { (self.checkpoint)(pid, &raw mut args) }.ok()
    }

    fn restore(&self, pid: i32) -> Result<(), CUresult> {
        let mut args = CUcheckpointRestoreArgs::ZERO;
        // SAFETY: as in `lock`.
        unsafe { (self.restore)(pid, &raw mut args) }.ok()
    }

    fn unlock(&self, pid: i32) -> Result<(), CUresult> {
        let mut args = CUcheckpointUnlockArgs::ZERO;
        // SAFETY: as in `lock`.
        unsafe { (self.unlock)(pid, &raw mut args) }.ok()
    }
}
