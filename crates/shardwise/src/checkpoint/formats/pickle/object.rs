//! The objects of a parsed pickle.

/// Index of an object in the table of its pickle.
pub(in crate::checkpoint) type ObjectId = u32;

/// An object of a pickle. Objects refer to each other by index: one that is used twice, or contains itself, is one entry.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::checkpoint) enum Object {
    /// Python's `None`.
    None,
    /// A boolean.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// An integer that does not fit in 64 bits; its value is not kept.
    BigInt,
    /// A floating-point number.
    Float(f64),
    /// A string.
    Text(Box<str>),
    /// A `bytes` object.
    Bytes(Box<[u8]>),
    /// A list.
    List(Vec<ObjectId>),
    /// A tuple.
    Tuple(Box<[ObjectId]>),
    /// A dict: key-value pairs in the order of insertion.
    Dict(Vec<(ObjectId, ObjectId)>),
    /// A set.
    Set(Vec<ObjectId>),
    /// Module and name of a class or function.
    Global(Box<(String, String)>),
    /// Module and name of a class or function that checkpoints have no use for. Its instances cannot be read.
    Foreign(Box<(String, String)>),
    /// The result of a call that was recorded and not executed, or an instance of a class.
    Constructed {
        /// The class or function.
        callable: ObjectId,
        /// The tuple of arguments.
        args: ObjectId,
        /// The state that `BUILD` would have set, usually the `__dict__`.
        state: Option<ObjectId>,
    },
    /// A reference to an object outside the pickle (`persistent_id`): a storage of the archive.
    PersistentId(ObjectId),
}
