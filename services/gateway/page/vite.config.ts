import { defineConfig } from "vite";

// Everything below `built` is committed: who serves needs no node.
export default defineConfig({
  base: "./", // works behind any prefix
  build: {
    outDir: "../api/tessera/built",
    emptyOutDir: true,
    assetsDir: "page", // what the gateway serves at /page/
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: "es2022",
    chunkSizeWarningLimit: 400,
    rollupOptions: { input: ["index.html", "system.html"] },
  },
});
