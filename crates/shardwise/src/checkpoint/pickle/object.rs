//! Objects that pickles build.

/// Number of an object of a pickle.
pub(in crate::checkpoint) type ObjectId = u32;

/// What a pickle builds. Objects refer to others by number: one that is used twice, or contains itself, is still one entry.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::checkpoint) enum Object {
    /// Nothing.
    None,
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A whole number that 64 bits cannot hold.
    BigInt,
    /// A number.
    Float(f64),
    /// Text.
    Text(Box<str>),
    /// Bytes.
    Bytes(Box<[u8]>),
    /// A list.
    List(Vec<ObjectId>),
    /// A tuple.
    Tuple(Box<[ObjectId]>),
    /// Pairs in the order in which they were put in.
    Dict(Vec<(ObjectId, ObjectId)>),
    /// A set.
    Set(Vec<ObjectId>),
    /// The name of a class or function.
    Global(Box<(String, String)>),
    /// The result of a call that was not made, or an object of a class.
    Constructed {
        /// What would have been called.
        callable: ObjectId,
        /// The tuple of its arguments.
        args: ObjectId,
        /// What the object would have been filled with.
        state: Option<ObjectId>,
    },
    /// Something outside the pickle, by its name there.
    PersistentId(ObjectId),
}
