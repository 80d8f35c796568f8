//! Interned values: equal values share one allocation, so that comparing two is comparing pointers, and hashing one reads a
//! stored hash.

use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustc_hash::FxHasher;

/// A handle to an interned value; two handles are equal exactly if they point to the same allocation.
pub(crate) struct Interned<T>(Arc<Hashed<T>>);

/// A value and the hash of its contents, which is the same in every process, unlike the address.
struct Hashed<T> {
    hash: u64,
    value: T,
}

impl<T> Clone for Interned<T> {
    fn clone(&self) -> Self {
        Interned(Arc::clone(&self.0))
    }
}

impl<T> Deref for Interned<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0.value
    }
}

impl<T> PartialEq for Interned<T> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<T> Eq for Interned<T> {}

impl<T> Hash for Interned<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // Not the address: ranks that are processes compare hashes with each other.
        state.write_u64(self.0.hash);
    }
}

impl<T: fmt::Debug> fmt::Debug for Interned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.value.fmt(f)
    }
}

/// The intern table of one type. It keeps no value alive: entries without handles are removed when the table grows.
pub(crate) struct Interner<T> {
    table: Mutex<InternTable<T>>,
}

struct InternTable<T> {
    by_hash: HashMap<u64, Vec<Weak<Hashed<T>>>>,
    sweep_at: usize,
}

/// The number of entries below which removing dead ones is not worth the pass.
const FIRST_SWEEP: usize = 1024;

impl<T: Eq + Hash> Interner<T> {
    pub(crate) fn new() -> Self {
        Interner { table: Mutex::new(InternTable { by_hash: HashMap::new(), sweep_at: FIRST_SWEEP }) }
    }

    /// Returns the handle of `value`: the existing one if an equal value is alive.
    pub(crate) fn intern(&self, value: T) -> Interned<T> {
        let mut hasher = FxHasher::default();
        value.hash(&mut hasher);
        let hash = hasher.finish();
        let mut table = self.table.lock();
        if table.by_hash.len() >= table.sweep_at {
            table.by_hash.retain(|_, bucket| {
                bucket.retain(|weak| weak.strong_count() > 0);
                !bucket.is_empty()
            });
            table.sweep_at = (2 * table.by_hash.len()).max(FIRST_SWEEP);
        }
        let bucket = table.by_hash.entry(hash).or_default();
        if let Some(found) = bucket.iter().filter_map(Weak::upgrade).find(|found| found.value == value) {
            return Interned(found);
        }
        // Remove dead entries of this bucket: a value that is created and dropped repeatedly must not accumulate them.
        bucket.retain(|weak| weak.strong_count() > 0);
        let new = Arc::new(Hashed { hash, value });
        bucket.push(Arc::downgrade(&new));
        Interned(new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_share_one_allocation_and_dead_ones_are_swept() {
        let interner = Interner::new();
        let a = interner.intern("a".to_string());
        assert!(a == interner.intern("a".to_string()));
        assert!(a != interner.intern("b".to_string()));
        for i in 0..10 * FIRST_SWEEP {
            interner.intern(i.to_string());
        }
        assert!(interner.table.lock().by_hash.len() <= FIRST_SWEEP + 1);
        for _ in 0..1000 {
            interner.intern("again".to_string());
        }
        assert!(interner.table.lock().by_hash.values().all(|bucket| bucket.len() <= 2));
        assert!(a == interner.intern("a".to_string()));
    }
}
