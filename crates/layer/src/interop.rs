//! Driver functions outside `cuda.h`, classes only: those that share with graphics libraries (OpenGL, EGL, VDPAU), and the profiler's.
//!
//! They stand in headers of their own and take types of those libraries, so the list of functions has not got them. None is hooked:
//! the memory is the graphics library's, which nobody moves. A context that one of them makes is met at the program's next call.
//! What a program presents to an EGL stream itself is not pinned: `docs/design/0002-layer.md`.

/// Calls `$callback!` with the table: class, then names.
macro_rules! for_each_interop {
    ($callback:ident) => {
        $callback! {
            pass { cuProfilerInitialize cuProfilerStart cuProfilerStop }
            lifetime { cuGLCtxCreate cuGLCtxCreate_v2 cuGLInit cuVDPAUCtxCreate cuVDPAUCtxCreate_v2 }
            query { cuGLGetDevices cuGLGetDevices_v2 cuVDPAUGetDevice }
            share {
                cuEGLStreamConsumerAcquireFrame cuEGLStreamConsumerConnect cuEGLStreamConsumerConnectWithFlags
                cuEGLStreamConsumerDisconnect cuEGLStreamConsumerReleaseFrame cuEGLStreamProducerConnect
                cuEGLStreamProducerDisconnect cuEGLStreamProducerPresentFrame cuEGLStreamProducerReturnFrame
                cuEventCreateFromEGLSync cuGLMapBufferObject cuGLMapBufferObjectAsync
                cuGLMapBufferObjectAsync_v2 cuGLMapBufferObject_v2 cuGLRegisterBufferObject
                cuGLSetBufferObjectMapFlags cuGLUnmapBufferObject cuGLUnmapBufferObjectAsync
                cuGLUnregisterBufferObject cuGraphicsEGLRegisterImage cuGraphicsGLRegisterBuffer
                cuGraphicsGLRegisterImage cuGraphicsResourceGetMappedEglFrame
                cuGraphicsVDPAURegisterOutputSurface cuGraphicsVDPAURegisterVideoSurface
            }
        }
    };
}

macro_rules! text {
    ($( $class:ident { $($name:ident)* } )*) => {
        /// One function a line: name, class, treatment.
        pub(crate) const TEXT: &str = concat!($($(
            stringify!($name), " ", stringify!($class), " pass\n",
        )*)*);

        /// How many there are.
        #[cfg(test)]
        pub(crate) const COUNT: usize = [$($(stringify!($name)),*),*].len();
    };
}
for_each_interop!(text);
