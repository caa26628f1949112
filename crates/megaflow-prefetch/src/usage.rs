//! What the system says of a thread's reads: waits for the disk, and bytes that came from it.
#![cfg_attr(
    any(target_os = "linux", target_os = "android"),
    expect(unsafe_code, reason = "getrusage fills a structure of C")
)]

/// Reads of a thread that the page cache could not serve, since the thread began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct DiskUse {
    /// Page faults for which the thread had to wait for the disk.
    pub(crate) misses: u64,
    /// Bytes that were read from the disk for it.
    pub(crate) bytes: u64,
}

impl DiskUse {
    /// Of this thread, until now; zeros where the system does not tell.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    pub(crate) fn of_thread() -> Self {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: the pointer leads to room for one `rusage`, which the call fills or leaves as it is: zeros, a valid value.
        let usage = unsafe {
            libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
            usage.assume_init()
        };
        // The system counts blocks of 512 bytes.
        Self { misses: usage.ru_majflt.max(0) as u64, bytes: 512 * usage.ru_inblock.max(0) as u64 }
    }

    /// Of this thread, until now; zeros where the system does not tell.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    pub(crate) fn of_thread() -> Self {
        Self::default()
    }

    /// What came since `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        Self { misses: self.misses.saturating_sub(before.misses), bytes: self.bytes.saturating_sub(before.bytes) }
    }
}
