//! Python's pickles, plain data only: a [`Pickle`] is read without running, importing or building anything.
//!
//! A pickle is a program for a small stack machine. The operations that make numbers, texts, lists, tuples, sets and dicts are done;
//! those that name, call or build something of Python (`GLOBAL`, `REDUCE`, `BUILD` and their kin) end the reading with their
//! name and place. So does everything that a well-formed pickle does not do. No operation takes memory that its bytes in the
//! file do not pay for, and the sum has a limit: a hostile file costs time and memory in proportion to its unpacked length at
//! most, and never the process.
//!
//! Values are kept in tables and named by their number there ([`Node`]): a snapshot of a long training has millions of small
//! dicts. Lists, tuples and sets are one kind. Since a pickle can name a value twice and put a list into itself, what was read is a
//! graph: whoever walks it has to know how deep to go.

use std::collections::{BTreeMap, HashMap};
use std::io::Read;

/// Bounds of reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes for all values.
    pub memory: u64,
    /// Open marks: lists, tuples and dicts begun and not ended.
    pub depth: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory: 8 << 30,
            depth: 256,
        }
    }
}

/// A pickle that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{fault}")]
pub struct PickleError {
    /// The byte at which the operation begins that cannot be done.
    pub offset: u64,
    /// Why not.
    pub fault: Fault,
}

/// Why an operation cannot be done.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// It would bring something of Python to life.
    #[error("{0} refused: it names, calls or builds something of Python, and plain data needs none of it")]
    Refused(&'static str),
    /// There is no such operation.
    #[error("{0:#04x} is no operation of a pickle")]
    Unknown(u8),
    /// The file ends before the pickle does.
    #[error("the file ends before the pickle does")]
    Truncated,
    /// The stack has not what the operation takes.
    #[error("{0} finds nothing to work on")]
    Empty(&'static str),
    /// It works on a list or a dict, and something else is there.
    #[error("{0} finds a value of another kind")]
    Kind(&'static str),
    /// A key without its value.
    #[error("a key without its value")]
    Odd,
    /// It names a value that was never noted.
    #[error("value {0} was never noted")]
    Unnoted(u64),
    /// A number or a text that is none.
    #[error("found no {0}")]
    Malformed(&'static str),
    /// A line that is too long for a number or a text.
    #[error("a line of more than {LINE} bytes")]
    Line,
    /// A version that we do not know.
    #[error("version {0} of the format; 5 is the newest that is known")]
    Version(u8),
    /// More memory than [`Limits::memory`].
    #[error("it needs more than {0} bytes of memory")]
    Memory(u64),
    /// More marks than [`Limits::depth`].
    #[error("more than {0} lists or dicts inside each other")]
    Depth(usize),
    /// The file cannot be read, or is wrongly packed.
    #[error("cannot be read: {0}")]
    Io(std::io::Error),
}

/// The longest line of the text operations of old pickles.
const LINE: usize = 1 << 16;
/// Bytes of an entry of a tree, with what a half-full one adds.
const FAR: u64 = 48;

/// A value, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Node(u32);

/// A text, by its number: equal texts have equal numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Text(u32);

/// What a value is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// `None`, or what the reader was told to forget.
    None,
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A whole number above those.
    Unsigned(u64),
    /// A whole number that fits neither.
    Huge,
    /// A number.
    Float(f64),
    /// A text.
    Text(Text),
    /// Bytes, which are not kept.
    Bytes,
    /// A list, a tuple or a set.
    List(&'a [Node]),
    /// Keys and values, in order; of equal keys the last counts.
    Dict(&'a [(Node, Node)]),
}

impl Value<'_> {
    /// For people.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Bool(_) => "a truth value",
            Self::Int(_) | Self::Unsigned(_) => "a whole number",
            Self::Huge => "a number beyond 64 bits",
            Self::Float(_) => "a float",
            Self::Text(_) => "a text",
            Self::Bytes => "bytes",
            Self::List(_) => "a list",
            Self::Dict(_) => "a dict",
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Stored {
    None,
    Bool(bool),
    Int(i64),
    Unsigned(u64),
    Huge,
    Float(f64),
    Text(Text),
    Bytes,
    List(u32),
    Dict(u32),
}

/// What a pickle holds.
#[derive(Debug)]
pub struct Pickle {
    values: Vec<Stored>,
    lists: Vec<Vec<Node>>,
    dicts: Vec<Vec<(Node, Node)>>,
    texts: Vec<Box<str>>,
    numbers: HashMap<Box<str>, Text>,
    root: Node,
}

const NONE: Node = Node(0);
const TRUE: Node = Node(1);
const FALSE: Node = Node(2);
/// Where the numbers from 0 to 255 are.
const BYTES: u32 = 3;

impl Pickle {
    /// Reads one pickle. Values of dicts under the keys `forget` are dropped while reading: of their lists nothing is kept.
    ///
    /// # Errors
    /// If it is not plain data, not well-formed, or larger than the limits allow.
    pub fn read(input: &mut dyn Read, limits: Limits, forget: &[&str]) -> Result<Self, PickleError> {
        let mut machine = Machine::new(input, limits, forget);
        machine.run().map_err(|fault| PickleError {
            offset: machine.at,
            fault,
        })?;
        Ok(machine.made)
    }

    /// The value that it is all about.
    #[must_use]
    pub fn root(&self) -> Node {
        self.root
    }

    /// What a value is.
    #[must_use]
    pub fn value(&self, node: Node) -> Value<'_> {
        match self.values[node.0 as usize] {
            Stored::None => Value::None,
            Stored::Bool(value) => Value::Bool(value),
            Stored::Int(value) => Value::Int(value),
            Stored::Unsigned(value) => Value::Unsigned(value),
            Stored::Huge => Value::Huge,
            Stored::Float(value) => Value::Float(value),
            Stored::Text(text) => Value::Text(text),
            Stored::Bytes => Value::Bytes,
            Stored::List(list) => Value::List(&self.lists[list as usize]),
            Stored::Dict(dict) => Value::Dict(&self.dicts[dict as usize]),
        }
    }

    /// The number of a text, if it occurs.
    #[must_use]
    pub fn number(&self, text: &str) -> Option<Text> {
        self.numbers.get(text).copied()
    }

    /// A text.
    #[must_use]
    pub fn text(&self, text: Text) -> &str {
        &self.texts[text.0 as usize]
    }

    /// What a dict has under a text.
    #[must_use]
    pub fn get(&self, dict: &[(Node, Node)], key: Text) -> Option<Node> {
        dict.iter()
            .rev()
            .find(|&&(k, _)| matches!(self.values[k.0 as usize], Stored::Text(text) if text == key))
            .map(|&(_, value)| value)
    }
}

/// The file, and where in it we are.
struct Input<'a> {
    file: &'a mut dyn Read,
    buffer: Box<[u8]>,
    filled: usize,
    next: usize,
    /// Of the buffer's first byte.
    offset: u64,
}

impl Input<'_> {
    fn position(&self) -> u64 {
        self.offset + self.next as u64
    }

    /// What is left in the buffer, at least a byte.
    fn fill(&mut self) -> Result<&[u8], Fault> {
        while self.next == self.filled {
            self.offset += self.filled as u64;
            (self.next, self.filled) = (0, 0);
            match self.file.read(&mut self.buffer) {
                Ok(0) => return Err(Fault::Truncated),
                Ok(n) => self.filled = n,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Fault::Io(error)),
            }
        }
        Ok(&self.buffer[self.next..self.filled])
    }

    fn byte(&mut self) -> Result<u8, Fault> {
        let byte = self.fill()?[0];
        self.next += 1;
        Ok(byte)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let mut bytes = [0; N];
        for byte in &mut bytes {
            *byte = self.byte()?;
        }
        Ok(bytes)
    }

    /// Hands over the next `length` bytes piece by piece.
    fn pieces(&mut self, length: u64, mut take: impl FnMut(&[u8])) -> Result<(), Fault> {
        let mut left = length;
        while left > 0 {
            let piece = self.fill()?;
            let n = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            take(&piece[..n]);
            self.next += n;
            left -= n as u64;
        }
        Ok(())
    }

    fn line(&mut self) -> Result<String, Fault> {
        let mut line = Vec::new();
        loop {
            match self.byte()? {
                b'\n' => break,
                _ if line.len() == LINE => return Err(Fault::Line),
                byte => line.push(byte),
            }
        }
        String::from_utf8(line).map_err(|_| Fault::Malformed("text"))
    }
}

/// The stack machine.
struct Machine<'a> {
    input: Input<'a>,
    limits: Limits,
    made: Pickle,
    forget: Vec<Text>,
    stack: Vec<Node>,
    /// Heights of the stack.
    marks: Vec<usize>,
    /// Values that were noted for later, by number.
    /// What was noted under numbers that follow each other from 0, as Python's own pickler counts.
    memo: Vec<Node>,
    /// And under others: a number alone takes no memory.
    far: BTreeMap<u64, Node>,
    memory: u64,
    /// Where the operation began.
    at: u64,
}

impl<'a> Machine<'a> {
    fn new(file: &'a mut dyn Read, limits: Limits, forget: &[&str]) -> Self {
        let mut values = vec![Stored::None, Stored::Bool(true), Stored::Bool(false)];
        values.extend((0..256).map(Stored::Int));
        let mut machine = Self {
            input: Input {
                file,
                buffer: vec![0; 1 << 16].into(),
                filled: 0,
                next: 0,
                offset: 0,
            },
            limits,
            made: Pickle {
                values,
                lists: Vec::new(),
                dicts: Vec::new(),
                texts: Vec::new(),
                numbers: HashMap::new(),
                root: NONE,
            },
            forget: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Vec::new(),
            far: BTreeMap::new(),
            memory: 0,
            at: 0,
        };
        machine.forget = forget.iter().map(|key| machine.intern((*key).into())).collect();
        machine
    }

    fn run(&mut self) -> Result<(), Fault> {
        loop {
            self.at = self.input.position();
            let code = self.input.byte()?;
            if code == b'.' {
                self.made.root = self.pop("STOP")?;
                return Ok(());
            }
            self.step(code)?;
        }
    }

    fn step(&mut self, code: u8) -> Result<(), Fault> {
        match code {
            // The frame of it.
            0x80 => match self.input.byte()? {
                0..=5 => Ok(()),
                version => Err(Fault::Version(version)),
            },
            0x95 => self.input.array::<8>().map(|_| ()),
            b'(' => self.mark(),
            b'0' => match self.marks.last() {
                // Of a mark that has nothing above it, the mark itself.
                Some(&height) if height == self.stack.len() => {
                    self.marks.pop();
                    Ok(())
                }
                _ => self.pop("POP").map(|_| ()),
            },
            b'1' => self.above_mark("POP_MARK").map(|_| ()),
            b'2' => {
                let top = self.top("DUP")?;
                self.push(top)
            }
            // Numbers and the like.
            b'N' => self.push(NONE),
            0x88 => self.push(TRUE),
            0x89 => self.push(FALSE),
            b'K' => {
                let byte = self.input.byte()?;
                self.push(Node(BYTES + u32::from(byte)))
            }
            b'M' => {
                let value = u16::from_le_bytes(self.input.array()?);
                self.int(value.into())
            }
            b'J' => {
                let value = i32::from_le_bytes(self.input.array()?);
                self.int(value.into())
            }
            b'I' | b'L' => self.decimal(),
            0x8a => {
                let length = self.input.byte()?;
                self.long(length.into())
            }
            0x8b => {
                let length = u32::from_le_bytes(self.input.array()?);
                self.long(length.into())
            }
            b'F' => {
                let line = self.input.line()?;
                let value = line.trim().parse().map_err(|_| Fault::Malformed("float"))?;
                self.store(Stored::Float(value))
            }
            b'G' => {
                let value = f64::from_be_bytes(self.input.array()?);
                self.store(Stored::Float(value))
            }
            // Texts and bytes.
            b'S' => {
                let line = self.input.line()?;
                let line = line.trim_end();
                let inner = ['\'', '"']
                    .iter()
                    .find_map(|&quote| line.strip_prefix(quote)?.strip_suffix(quote));
                let inner = inner.ok_or(Fault::Malformed("quoted text"))?.to_owned();
                self.text(inner)
            }
            b'V' => {
                let line = self.input.line()?;
                self.text(line)
            }
            b'U' | 0x8c => self.sized_text(1),
            b'X' | b'T' => self.sized_text(4),
            0x8d => self.sized_text(8),
            b'C' => self.bytes(1),
            b'B' => self.bytes(4),
            0x8e | 0x96 => self.bytes(8),
            // Lists, tuples, sets.
            b']' | b')' | 0x8f => self.list(Vec::new()),
            b'l' | b't' | 0x91 => {
                let items = self.above_mark("LIST")?;
                self.list(items)
            }
            0x85 => self.tuple(1),
            0x86 => self.tuple(2),
            0x87 => self.tuple(3),
            b'a' => {
                let item = self.pop("APPEND")?;
                self.append("APPEND", &[item])
            }
            b'e' | 0x90 => {
                let items = self.above_mark("APPENDS")?;
                self.append("APPENDS", &items)
            }
            // Dicts.
            b'}' => self.dict(&[]),
            b'd' => {
                let items = self.above_mark("DICT")?;
                self.dict(&items)
            }
            b's' => {
                let value = self.pop("SETITEM")?;
                let key = self.pop("SETITEM")?;
                self.set("SETITEM", &[key, value])
            }
            b'u' => {
                let items = self.above_mark("SETITEMS")?;
                self.set("SETITEMS", &items)
            }
            // Values that are named again.
            0x94 => self.note((self.memo.len() + self.far.len()) as u64),
            b'q' => {
                let number = self.input.byte()?;
                self.note(number.into())
            }
            b'r' => {
                let number = u32::from_le_bytes(self.input.array()?);
                self.note(number.into())
            }
            b'p' => {
                let number = self.line_number()?;
                self.note(number)
            }
            b'h' => {
                let number = self.input.byte()?;
                self.recall(number.into())
            }
            b'j' => {
                let number = u32::from_le_bytes(self.input.array()?);
                self.recall(number.into())
            }
            b'g' => {
                let number = self.line_number()?;
                self.recall(number)
            }
            _ => Err(match refused(code) {
                Some(name) => Fault::Refused(name),
                None => Fault::Unknown(code),
            }),
        }
    }

    /// Counts memory that is about to be taken.
    fn charge(&mut self, bytes: u64) -> Result<(), Fault> {
        self.memory = self.memory.saturating_add(bytes);
        if self.memory > self.limits.memory {
            return Err(Fault::Memory(self.limits.memory));
        }
        Ok(())
    }

    fn push(&mut self, node: Node) -> Result<(), Fault> {
        // Only the largest stack counts, but then a stack never shrinks.
        if self.stack.len() == self.stack.capacity() {
            self.charge(4 * (self.stack.len() as u64).max(4))?;
        }
        self.stack.push(node);
        Ok(())
    }

    fn store(&mut self, value: Stored) -> Result<(), Fault> {
        self.charge(2 * size_of::<Stored>() as u64)?;
        let number = u32::try_from(self.made.values.len()).map_err(|_| Fault::Memory(self.limits.memory))?;
        self.made.values.push(value);
        self.push(Node(number))
    }

    fn mark(&mut self) -> Result<(), Fault> {
        if self.marks.len() == self.limits.depth {
            return Err(Fault::Depth(self.limits.depth));
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// The top, which has to lie above the last mark.
    fn top(&self, operation: &'static str) -> Result<Node, Fault> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.last() {
            Some(&node) if self.stack.len() > floor => Ok(node),
            _ => Err(Fault::Empty(operation)),
        }
    }

    fn pop(&mut self, operation: &'static str) -> Result<Node, Fault> {
        let top = self.top(operation)?;
        self.stack.pop();
        Ok(top)
    }

    fn above_mark(&mut self, operation: &'static str) -> Result<Vec<Node>, Fault> {
        let height = self.marks.pop().ok_or(Fault::Empty(operation))?;
        Ok(self.stack.split_off(height))
    }

    fn int(&mut self, value: i64) -> Result<(), Fault> {
        match u8::try_from(value) {
            Ok(byte) => self.push(Node(BYTES + u32::from(byte))),
            Err(_) => self.store(Stored::Int(value)),
        }
    }

    /// Little-endian, two's complement, of any length.
    fn long(&mut self, length: u64) -> Result<(), Fault> {
        let (mut bytes, mut count) = ([0u8; 16], 0usize);
        let mut beyond = false;
        self.input.pieces(length, |piece| {
            for &byte in piece {
                match bytes.get_mut(count) {
                    Some(place) => *place = byte,
                    None => beyond = true,
                }
                count += 1;
            }
        })?;
        if beyond {
            return self.store(Stored::Huge);
        }
        if count > 0 && bytes[count - 1] & 0x80 != 0 {
            bytes[count..].fill(0xff);
        }
        self.whole(i128::from_le_bytes(bytes))
    }

    fn whole(&mut self, value: i128) -> Result<(), Fault> {
        if let Ok(value) = i64::try_from(value) {
            self.int(value)
        } else if let Ok(value) = u64::try_from(value) {
            self.store(Stored::Unsigned(value))
        } else {
            self.store(Stored::Huge)
        }
    }

    /// `INT` and `LONG` of the oldest pickles; `INT` says truth by two digits.
    fn decimal(&mut self) -> Result<(), Fault> {
        let line = self.input.line()?;
        let digits = line.trim().trim_end_matches('L');
        match digits {
            "01" => return self.push(TRUE),
            "00" => return self.push(FALSE),
            _ => {}
        }
        let number = digits.strip_prefix('-').unwrap_or(digits);
        if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
            return Err(Fault::Malformed("whole number"));
        }
        match digits.parse() {
            Ok(value) => self.whole(value),
            Err(_) => self.store(Stored::Huge),
        }
    }

    fn line_number(&mut self) -> Result<u64, Fault> {
        let line = self.input.line()?;
        line.trim()
            .parse()
            .map_err(|_| Fault::Malformed("number of a value"))
    }

    fn length(&mut self, width: usize) -> Result<u64, Fault> {
        let mut bytes = [0; 8];
        for byte in &mut bytes[..width] {
            *byte = self.input.byte()?;
        }
        Ok(u64::from_le_bytes(bytes))
    }

    fn sized_text(&mut self, width: usize) -> Result<(), Fault> {
        let length = self.length(width)?;
        // The bytes come piece by piece: a length alone takes no memory.
        self.charge(length)?;
        let mut bytes = Vec::new();
        self.input
            .pieces(length, |piece| bytes.extend_from_slice(piece))?;
        self.memory -= length;
        let text = String::from_utf8(bytes).map_err(|_| Fault::Malformed("text in UTF-8"))?;
        self.text(text)
    }

    fn text(&mut self, text: String) -> Result<(), Fault> {
        if !self.made.numbers.contains_key(text.as_str()) {
            self.charge(2 * text.len() as u64 + 128)?;
        }
        let text = self.intern(text.into());
        self.store(Stored::Text(text))
    }

    fn intern(&mut self, text: Box<str>) -> Text {
        if let Some(&number) = self.made.numbers.get(&text) {
            return number;
        }
        // Each costs memory that is counted in bytes: they are fewer than values.
        let number = Text(u32::try_from(self.made.texts.len()).unwrap_or(u32::MAX));
        self.made.texts.push(text.clone());
        self.made.numbers.insert(text, number);
        number
    }

    fn bytes(&mut self, width: usize) -> Result<(), Fault> {
        let length = self.length(width)?;
        self.input.pieces(length, |_| {})?;
        self.store(Stored::Bytes)
    }

    fn list(&mut self, items: Vec<Node>) -> Result<(), Fault> {
        self.charge(24 + 8 * items.len() as u64)?;
        let number = u32::try_from(self.made.lists.len()).map_err(|_| Fault::Memory(self.limits.memory))?;
        self.made.lists.push(items);
        self.store(Stored::List(number))
    }

    fn tuple(&mut self, length: usize) -> Result<(), Fault> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() < floor + length {
            return Err(Fault::Empty("TUPLE"));
        }
        let items = self.stack.split_off(self.stack.len() - length);
        self.list(items)
    }

    fn append(&mut self, operation: &'static str, items: &[Node]) -> Result<(), Fault> {
        let top = self.top(operation)?;
        self.charge(8 * items.len() as u64)?;
        match self.made.values[top.0 as usize] {
            Stored::List(list) => {
                self.made.lists[list as usize].extend_from_slice(items);
                Ok(())
            }
            _ => Err(Fault::Kind(operation)),
        }
    }

    fn dict(&mut self, items: &[Node]) -> Result<(), Fault> {
        self.charge(24)?;
        let number = u32::try_from(self.made.dicts.len()).map_err(|_| Fault::Memory(self.limits.memory))?;
        self.made.dicts.push(Vec::new());
        self.store(Stored::Dict(number))?;
        self.set("DICT", items)
    }

    fn set(&mut self, operation: &'static str, items: &[Node]) -> Result<(), Fault> {
        let top = self.top(operation)?;
        let (pairs, []) = items.as_chunks::<2>() else {
            return Err(Fault::Odd);
        };
        self.charge(16 * pairs.len() as u64)?;
        let Stored::Dict(dict) = self.made.values[top.0 as usize] else {
            return Err(Fault::Kind(operation));
        };
        for &[key, value] in pairs {
            let value = if self.forgets(key) {
                self.forget(value)
            } else {
                value
            };
            self.made.dicts[dict as usize].push((key, value));
        }
        Ok(())
    }

    fn forgets(&self, key: Node) -> bool {
        matches!(self.made.values[key.0 as usize], Stored::Text(text) if self.forget.contains(&text))
    }

    fn forget(&mut self, value: Node) -> Node {
        if let Stored::List(list) = self.made.values[value.0 as usize] {
            let items = std::mem::take(&mut self.made.lists[list as usize]);
            self.memory -= 8 * items.len() as u64;
        }
        NONE
    }

    fn note(&mut self, number: u64) -> Result<(), Fault> {
        let top = self.top("MEMOIZE")?;
        let known = self.memo.len() as u64;
        match self.memo.get_mut(usize::try_from(number).unwrap_or(usize::MAX)) {
            Some(noted) => *noted = top,
            None if number == known => {
                self.charge(8)?;
                self.memo.push(top);
                self.far.remove(&number);
            }
            None => {
                self.charge(FAR)?;
                self.far.insert(number, top);
            }
        }
        Ok(())
    }

    fn recall(&mut self, number: u64) -> Result<(), Fault> {
        let near = usize::try_from(number)
            .ok()
            .and_then(|number| self.memo.get(number));
        let noted = near.or_else(|| self.far.get(&number)).copied();
        self.push(noted.ok_or(Fault::Unnoted(number))?)
    }
}

/// Operations that are there in Python, and not here.
fn refused(code: u8) -> Option<&'static str> {
    Some(match code {
        b'c' => "GLOBAL",
        b'R' => "REDUCE",
        b'b' => "BUILD",
        b'i' => "INST",
        b'o' => "OBJ",
        b'P' => "PERSID",
        b'Q' => "BINPERSID",
        0x81 => "NEWOBJ",
        0x82 => "EXT1",
        0x83 => "EXT2",
        0x84 => "EXT4",
        0x92 => "NEWOBJ_EX",
        0x93 => "STACK_GLOBAL",
        0x97 => "NEXT_BUFFER",
        0x98 => "READONLY_BUFFER",
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
