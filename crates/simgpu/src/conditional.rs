//! Conditional nodes. No built-in kernel sets a condition, so its value is the default of the handle: the branch is known when the graph is
//! instantiated. A loop whose condition starts out true could never end and is NOT_SUPPORTED.

use std::sync::Arc;
use std::sync::Mutex;

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::graph::{Action, Graph, NodeRef, Nodes, find};
use crate::handles::fresh;
use crate::process::lock;
use crate::work::Work;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;
/// `CU_GRAPH_COND_ASSIGN_DEFAULT`.
const ASSIGN_DEFAULT: u32 = 1;
/// The kinds: `CU_GRAPH_COND_TYPE_...`.
const IF: u32 = 0;
const WHILE: u32 = 1;
const SWITCH: u32 = 2;

/// A handle of a graph: its value at each launch, and whether a node uses it.
#[derive(Debug)]
pub(crate) struct Condition {
    handle: u64,
    value: u32,
    used: bool,
}

/// A conditional node.
#[derive(Debug)]
pub(crate) struct Conditional {
    kind: u32,
    value: u32,
    /// The graphs to choose from, which the program fills.
    bodies: Vec<Arc<Graph>>,
    /// Their handles in the place that the program was told of, for the life of the node.
    _told: Box<[CUgraph]>,
}

impl Drop for Conditional {
    fn drop(&mut self) {
        self.bodies.iter().for_each(|body| body.forget());
    }
}

impl Conditional {
    /// What the node comes to.
    fn chosen(&self) -> Result<Action, CUresult> {
        let index = match self.kind {
            WHILE if self.value != 0 => return Err(CUresult::ERROR_NOT_SUPPORTED),
            WHILE => None,
            IF if self.value != 0 => Some(0),
            IF => Some(1),
            _ => Some(self.value as usize),
        };
        match index.and_then(|index| self.bodies.get(index)) {
            Some(body) => Ok(Action::Child(resolve(&lock(&body.nodes).clone())?, body.handle)),
            None => Ok(Action::Work(Work::Empty)),
        }
    }
}

/// The nodes with every conditional node replaced by what it comes to.
pub(crate) fn resolve(nodes: &Nodes) -> Result<Nodes, CUresult> {
    let mut resolved = nodes.clone();
    for node in resolved.values_mut() {
        if let Action::Conditional(conditional) = &node.action {
            let chosen = conditional.chosen()?;
            node.action = chosen;
        }
    }
    Ok(resolved)
}

/// Whether a graph has a handle that no node uses.
pub(crate) fn has_unused(graph: &Graph) -> bool {
    lock(&graph.conditions).iter().any(|condition| !condition.used)
}

pub(crate) fn cuGraphConditionalHandleCreate(
    c: &Caller,
    pHandle_out: *mut CUgraphConditionalHandle,
    hGraph: CUgraph,
    _ctx: CUcontext,
    defaultLaunchValue: u32,
    flags: u32,
) -> R {
    let graph = find(hGraph)?;
    if pHandle_out.is_null() || flags & !ASSIGN_DEFAULT != 0 {
        return Err(INVALID);
    }
    let handle = fresh() as u64;
    lock(&graph.conditions).push(Condition {
        handle,
        value: if flags == ASSIGN_DEFAULT {
            defaultLaunchValue
        } else {
            0
        },
        used: false,
    });
    c.put(pHandle_out, CUgraphConditionalHandle(handle))
}

/// The parameters as the general form has them: the handle, the kind, the number of graphs, and where to tell them.
#[repr(C)]
#[derive(Clone, Copy)]
struct Parameters {
    handle: u64,
    kind: u32,
    size: u32,
    told: *const CUgraph,
    context: CUcontext,
}

pub(crate) fn add(c: &Caller, graph: &Graph, after: &[NodeRef], place: *mut u8) -> Result<NodeRef, CUresult> {
    let mut p = c.get(place.cast_const().cast::<Parameters>())?;
    let fits = match p.kind {
        IF => matches!(p.size, 1 | 2),
        WHILE => p.size == 1,
        SWITCH => p.size > 0 && p.size <= 4096,
        _ => false,
    };
    if !fits {
        return Err(INVALID);
    }
    let value = {
        let mut conditions = lock(&graph.conditions);
        let condition = conditions
            .iter_mut()
            .find(|condition| condition.handle == p.handle && !condition.used)
            .ok_or(INVALID)?;
        condition.used = true;
        condition.value
    };
    let bodies: Vec<Arc<Graph>> = (0..p.size).map(|_| Graph::new()).collect();
    let told: Box<[CUgraph]> = bodies.iter().map(|body| CUgraph(body.handle)).collect();
    p.told = told.as_ptr();
    let conditional = Conditional {
        kind: p.kind,
        value,
        bodies,
        _told: told,
    };
    let node = graph.add(Action::Conditional(Arc::new(conditional)), after)?;
    c.put(place.cast(), p)?;
    Ok(node)
}

/// The conditions of a new graph: none.
pub(crate) type Conditions = Mutex<Vec<Condition>>;
